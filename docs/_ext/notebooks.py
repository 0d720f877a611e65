"""Write the Jupyter copies of the notebooks, and measure the results of the notebooks at full size.

    python docs/_ext/notebooks.py sync [NAME]
    python docs/_ext/notebooks.py execute [NAME]

A notebook is stored in docs/notebooks as text, NAME.md, and as the copy NAME.ipynb, which the site and forges show. All
code below the heading "The experiment" measures; the code above it draws from NAME.json, the results at full size.

`sync` executes the code above that heading, and writes NAME.ipynb with the outputs. In the copy, each
`{{ expression }}` of the text is replaced by its value; an expression may end with a format, as in an f-string.
`execute` measures at full size: it sets PYTORCHRL_NOTEBOOKS=full, executes the code below the heading in an empty
folder, writes the variable `results` to NAME.json, and then does what `sync` does.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import io
import json
import math
import os
import platform
import pprint
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
EXPERIMENT = "## The experiment"
EXPRESSION = re.compile(r"\{\{ (.+?) \}\}", re.DOTALL)
# Appended to the code of the experiment, to learn what it measured.
REPORT = """import json, os
print(json.dumps({"seeds": list(globals().get("SEEDS", ())), "core_s": sum(os.times()[:4]), "results": results},
                 default=lambda value: value.tolist()))"""


def names() -> list[str]:
    """Return the names of all notebooks; a page without kernel is not a notebook."""
    return sorted(page.stem for page in FOLDER.glob("*.md") if "\nkernelspec:" in page.read_text(encoding="utf-8"))


def notebook_of(name: str) -> Any:
    """Return the notebook that the text of a name describes, with cells that are numbered from 0."""
    notebook = jupytext.read(FOLDER / f"{name}.md", fmt="md:myst")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = str(number)
    notebook.metadata.pop("jupytext", None)
    return notebook


def parts_of(notebook: Any) -> tuple[list[Any], list[Any]]:
    """Return the cells before the experiment, and those of the experiment, which a notebook may lack."""
    first = next((number for number, cell in enumerate(notebook.cells)
                  if cell.cell_type == "markdown" and f"\n{EXPERIMENT}\n" in f"\n{cell.source}\n"), len(notebook.cells))
    # The cell with the heading also contains the text before the heading.
    return notebook.cells[:first + 1], notebook.cells[first + 1:]


def checksum_of_experiment(name: str) -> str:
    """Return a checksum of the code that measures; blanks and line breaks do not change it."""
    code = "\n".join(cell.source for cell in parts_of(notebook_of(name))[1] if cell.cell_type == "code")
    return hashlib.sha256(re.sub(r"\s", "", code).encode()).hexdigest()[:16]


def drawn(name: str) -> Any:
    """Return a notebook with the outputs of the code before the experiment, and with values in place of expressions."""
    import matplotlib

    matplotlib.use("agg")
    notebook, before = notebook_of(name), Path.cwd()
    scope = {"__name__": "__main__", "measured": _provenance(name)}
    notebook.metadata["language_info"] = {"name": "python"}
    cells, _ = parts_of(notebook)
    os.chdir(FOLDER)
    try:
        for cell in cells:
            if cell.cell_type == "code":
                cell["outputs"] = list(_outputs_of(cell.source, scope))
            else:
                cell["source"] = EXPRESSION.sub(lambda match: _value_of(match[1], scope), cell.source)
    finally:
        os.chdir(before)
    counted = (cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs)
    for number, cell in enumerate(counted, start=1):
        for part in (cell, *(output for output in cell.outputs if output.output_type == "execute_result")):
            part["execution_count"] = number
    return notebook


def _provenance(name: str) -> str:
    """Return a sentence that says how the results were measured; it is the value of `measured` in expressions."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return ""
    record = json.loads(path.read_text(encoding="utf-8"))
    return (f"The results are in [{path.name}]({path.name}); `{record['command']}` measured them in "
            f"{record['core_seconds'] / 60:.1f} minutes of one core ({record['machine']}).")


def _outputs_of(code: str, scope: dict[str, Any]) -> Iterator[Any]:
    """Execute a cell as Jupyter does; yield what it printed, its figures, and the value of its last expression."""
    import matplotlib.pyplot as plt

    tree, printed, value = ast.parse(code), io.StringIO(), None
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) and not code.endswith(";") else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), scope)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), scope)
    if printed.getvalue():
        yield nbformat.v4.new_output("stream", name="stdout", text=printed.getvalue())
    for number in plt.get_fignums():
        yield nbformat.v4.new_output("display_data", {"image/png": _png_of(plt.figure(number))})
    plt.close("all")
    if value is not None:
        data = {"text/plain": pprint.pformat(value, sort_dicts=False)}
        if hasattr(value, "_repr_markdown_"):
            data["text/markdown"] = value._repr_markdown_()
        yield nbformat.v4.new_output("execute_result", data)


def _png_of(figure: Any) -> str:
    """Return a figure as an encoded picture with at most 256 colors, which is a third as large as with all colors."""
    from PIL import Image

    picture, small = io.BytesIO(), io.BytesIO()
    figure.savefig(picture, dpi=110, facecolor="white")
    Image.open(picture).convert("RGB").quantize(colors=256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def _value_of(expression: str, scope: dict[str, Any]) -> str:
    try:
        return eval(f'f"""{{{expression}}}"""', scope)
    except Exception as error:
        raise ValueError(f"{{{{ {expression} }}}} in the text has no value: {error!r}") from error


def jupyter_copy(name: str) -> str:
    """Return the contents of the file NAME.ipynb."""
    return nbformat.writes(drawn(name)) + "\n"


def run(name: str, cells: list[Any], size: str) -> str:
    """Execute code cells beside the stored results, at a size, "small" or "full"; return what the last cell printed."""
    notebook = nbformat.v4.new_notebook(cells=[cell for cell in cells if cell.cell_type == "code"])
    start = time.monotonic()

    def report(cell: Any, cell_index: int) -> None:
        print(f"{name}: cell {cell_index + 1} of {len(notebook.cells)}, {time.monotonic() - start:.0f} s", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        if (FOLDER / f"{name}.json").exists():
            shutil.copy(FOLDER / f"{name}.json", folder)
        client = NotebookClient(notebook, timeout=None, kernel_name="python3", on_cell_start=report,
                                resources={"metadata": {"path": folder}})
        client.execute(env={**os.environ, "PYTORCHRL_NOTEBOOKS": size})
    return "".join(output.get("text", "") for output in notebook.cells[-1].outputs)


def execute(name: str) -> None:
    """Measure the results of a notebook at full size, and write them."""
    start, load, checksum = time.monotonic(), os.getloadavg()[0], checksum_of_experiment(name)
    found = json.loads(run(name, [*parts_of(notebook_of(name))[1], nbformat.v4.new_code_cell(REPORT)], "full"))
    seconds = time.monotonic() - start
    record = {
        "command": f"make notebooks NOTEBOOK={name}", "commit": _commit(), "experiment": checksum,
        "seeds": found["seeds"], "seconds": round(seconds), "core_seconds": round(found["core_s"]),
        "machine": _machine(), "load_at_start": round(load, 1), "python": platform.python_version(),
        **{package: __import__(package).__version__ for package in ("torch", "numpy", "gymnasium")}}
    (FOLDER / f"{name}.json").write_text(as_json(record, rounded(found["results"])), encoding="utf-8")
    print(f"{FOLDER / name}.json: measured in {seconds:.0f} s, {found['core_s']:.0f} s of one core", flush=True)


def _commit() -> str:
    """Return the last commit of the library; the code of the experiment has a checksum of its own."""
    command = ["git", "log", "-1", "--format=%h", "--", "pytorchrl"]
    return subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=True).stdout.strip()


def _machine() -> str:
    """Return the model of the processor, if the system names it, and the number of cores."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", re.MULTILINE)
    return f"{model[1] if model else platform.processor()}, {os.cpu_count()} cores"


def rounded(value: Any) -> Any:
    """Return a value of JSON whose real numbers have six digits; numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def as_json(record: dict[str, Any], results: dict[str, Any]) -> str:
    """Return the text of NAME.json, with one line for each entry of the record and of the results."""
    def lines(entries: dict[str, Any]) -> str:
        return ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())

    return f'{{\n{lines(record)},\n"results": {{\n{lines(results)}\n}}}}\n'


def main(command: str = "", *selected: str) -> int:
    """Execute one command; return the exit code."""
    unknown = sorted(set(selected) - set(names()))
    if command not in ("sync", "execute") or unknown:
        print(f"notebooks.py: got {[command, *selected]}, but expected sync or execute, and names among "
              f"{', '.join(names())}", file=sys.stderr)
        return 2
    for name in selected or names():
        if command == "execute" and parts_of(notebook_of(name))[1]:
            execute(name)
        (FOLDER / f"{name}.ipynb").write_text(jupyter_copy(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
