"""Keep figures that benchmarks have printed in a history, and make the table of the documentation from it.

    python benchmarks/roofline.py --seconds 8 | python benchmarks/history.py --keep roofline.py \
        --figure "ours=env steps per core-second"
    python benchmarks/history.py

With `--keep`, the script reads the JSON objects that a benchmark prints, and appends a line to the history for each
figure: a number whose key is given with `--figure`, together with its unit. The name of a figure consists of the texts
beside the number and of the names of the objects that contain it. Without `--keep`, the script writes the table.

A line of the history contains the commit that was measured and the machine, both null if they are unknown; the commit
of this project that added the figure to a file of `docs/benchmarks/`, null for figures that were kept by this script;
and the date of the measurement or, for older figures, of that commit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HISTORY = Path(__file__).parent.parent / "docs" / "benchmarks" / "history.jsonl"


def objects_in(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a benchmark's output, each of which may span several lines."""
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        found, at = decoder.raw_decode(text, at)
        yield found


def figures_of(value: object, units: Mapping[str, str], names: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Yield the name, value and unit of each number under a key in `units`."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from figures_of(item, units, names if isinstance(item, dict) else (*names, str(index)))
    elif isinstance(value, dict):
        texts = [text for key, text in value.items() if key not in ("commit", "machine") and isinstance(text, str)]
        for key, item in value.items():
            if key in units and isinstance(item, (int, float)):
                yield {"name": ", ".join([*names, *texts, key]), "value": item, "unit": units[key]}
            elif isinstance(item, (dict, list)) and key != "machine":
                yield from figures_of(item, units, (*names, *texts, key))


def keep(text: str, script: str, units: Mapping[str, str], date: str) -> list[dict[str, Any]]:
    """Return the lines of the history for the output of a script."""
    return [{"commit": result.get("commit"), "recorded": None, "date": date,
             "machine": (result.get("machine") or {}).get("processor"), "script": script, **figure, "source": None}
            for result in objects_in(text) for figure in figures_of(result, units)]


def table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table with one row per figure and machine; the newest value is the last one."""
    rows = defaultdict(list)
    for line in lines:
        commit = line["commit"] or line["recorded"]
        key = line["script"], line["name"], line["unit"], line["machine"] or ""
        rows[key].append(f"{line['value']:,} ({line['date']}, {commit})")
    head = "| script | figure | unit | machine | values (date, commit) |\n|---|---|---|---|---|\n"
    return head + "".join(f"| `{script}` | {name} | {unit} | {machine} | {'; '.join(values)} |\n"
                          for (script, name, unit, machine), values in sorted(rows.items()))


def main() -> None:
    """Append figures to the history, or write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", metavar="SCRIPT", help="the benchmark whose output is the standard input")
    parser.add_argument("--figure", metavar="KEY=UNIT", action="append", default=[],
                        help="key of a number in the output, and its unit; may be repeated")
    parser.add_argument("--history", type=Path, default=HISTORY, help="file of the history")
    options = parser.parse_args()
    if options.keep:
        units = dict(figure.partition("=")[::2] for figure in options.figure)
        lines = keep(sys.stdin.read(), options.keep, units, datetime.date.today().isoformat())
        if not lines:
            parser.error(f"the output contains no number under the keys {sorted(units)}; give its keys with --figure")
        with options.history.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        return
    lines = [json.loads(line) for line in options.history.read_text(encoding="utf-8").splitlines()]
    options.history.with_suffix(".md").write_text(table(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
