"""Run the lag study: which corrections tolerate how much lag, and what warns of a collapse.

    python benchmarks/lag/study.py scores [--hours 1.0]      Q1: score against lag, for each correction
    python benchmarks/lag/study.py collapse                  Q2: learning rate times lag
    python benchmarks/lag/study.py proximal                  Q4: exact and approximated proximal policies
    python benchmarks/lag/study.py tails                     Q5: answers that take long
    python benchmarks/lag/study.py generation                Q6: weights that change within a sequence
    python benchmarks/lag/study.py scores --repeat 10        repeat runs drawn by lot, and compare their checksums
    python benchmarks/lag/study.py --list                    print the number of runs of each question

Each run is a function of its settings. When it ends, its line of JSON is appended to `docs/benchmarks/lag/`, and later
calls skip it, so the study grows in as many calls as needed: no new run starts after `--hours`. Several calls may run
at the same time. The base decoder is made first, if it is missing (10 seconds).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from base import save_base
from results import origin
from runs import PUBLISHED, CollapseRun, ControlRun, GenerationRun, ProximalRun, Settings, TailRun, TokenRun
from torch import set_num_threads

OUT = Path(__file__).parents[2] / "docs" / "benchmarks" / "lag"
LAGS = (0, 1, 2, 4, 8, 16)
RATES = tuple(1e-3 * 2.0 ** power for power in range(-2, 4))


def scores() -> Iterator[Settings]:
    """Q1: all corrections, lags and seeds, the first seeds of all first."""
    for seed in range(1, 21):
        for lag in LAGS:
            yield from (TokenRun(correction, lag, seed) for correction in PUBLISHED)
    for seed in range(1, 11):
        for lag in (0, 2, 8, 16):
            yield from (ControlRun(correction, lag, seed) for correction in ("none", "ppo", "decoupled", "vtrace"))


def collapse() -> Iterator[Settings]:
    """Q2: the score in a grid of learning rates and lags."""
    for seed in range(1, 6):
        for correction in ("ppo", "decoupled", "tis"):
            yield from (CollapseRun(correction, lag, seed, lr=lr) for lag in LAGS for lr in RATES)


def proximal() -> Iterator[Settings]:
    """Q4: the exact proximal policy, its approximation, the proximal policy for mu, and mu for the proximal policy."""
    for seed in range(1, 11):
        yield from (ProximalRun(correction, lag, seed) for lag in (0, 4, 16)
                    for correction in ("decoupled", "a3po", "recomputed", "ppo"))


def tails() -> Iterator[Settings]:
    """Q5: what happens to answers that take long, while others have ended."""
    for seed in range(1, 11):
        yield from (TailRun("decoupled", lag, seed, policy=policy) for lag in (1, 4)
                    for policy in ("wait", "keep", "oldest", "drop", "cancel"))


def generation() -> Iterator[Settings]:
    """Q6: what happens to sequences that grow while weights change."""
    for seed in range(1, 11):
        yield from (GenerationRun("decoupled", lag, seed, mode=mode) for lag in (1, 4)
                    for mode in ("finish", "keep", "recompute"))


QUESTIONS = {"scores": scores, "collapse": collapse, "proximal": proximal, "tails": tails, "generation": generation}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def results_of(question: str, folder: Path) -> list[dict[str, Any]]:
    """Return the results of a question of those seeds of which all runs of a kind are made."""
    lines = lines_of(folder / f"{question}.jsonl")
    known = {line["id"] for line in lines}
    missing = {(type(each).__name__, each.seed) for each in QUESTIONS[question]() if each.id not in known}
    return [line for line in lines if (line["id"].partition("/")[0], line["seed"]) not in missing]


def claim(name: str, claims: Path) -> bool:
    """Return whether no other process has begun a run; if so, other processes see that this one has begun it."""
    claims.mkdir(parents=True, exist_ok=True)
    try:
        (claims / name.replace("/", "_")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def repeat(path: Path, number: int, base: Path, seed: int) -> int:
    """Repeat runs that are drawn by lot; return the number of those with another checksum."""
    known = {line["id"]: line for line in lines_of(path)}
    settings = {each.id: each for each in QUESTIONS[path.stem]()}
    differing = 0
    for name in random.Random(seed).sample(sorted(known), min(number, len(known))):
        found = settings[name].run(base)
        is_equal = found["checksum"] == known[name]["checksum"]
        differing += not is_equal
        print(json.dumps({"id": name, "equal": is_equal, "checksum": found["checksum"]}), flush=True)
    return differing


def main() -> None:
    """Parse the command line, and make the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", choices=QUESTIONS)
    parser.add_argument("--hours", type=float, default=1.0, help="hours after which no run is started")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--work", type=Path, default=Path("lag_study"), help="folder of base decoders and claims")
    parser.add_argument("--seeds", type=int, help="only runs whose seed is at most this")
    parser.add_argument("--repeat", type=int, help="repeat so many runs, drawn by lot, and compare their checksums")
    parser.add_argument("--lot", type=int, default=0, help="seed of the lot")
    parser.add_argument("--list", action="store_true", help="run nothing, and print the number of runs")
    options = parser.parse_args()
    set_num_threads(1)
    if options.list or options.question is None:
        for name, question in QUESTIONS.items():
            print(f"{name:12}{len(list(question())):5} runs, {len(lines_of(options.out / f'{name}.jsonl'))} made")
        return
    path = options.out / f"{options.question}.jsonl"
    if options.repeat:
        sys.exit(repeat(path, options.repeat, options.work, options.lot))
    end, wanted = time.monotonic() + 3600 * options.hours, QUESTIONS[options.question]()
    known = {line["id"] for line in lines_of(path)}
    claims = options.work / f"claims_{os.uname().nodename}"
    for settings in wanted:
        if time.monotonic() > end:
            return
        if settings.id in known or (options.seeds and settings.seed > options.seeds) or not claim(settings.id, claims):
            continue
        save_base(settings.task, options.work)
        found = {**origin(), "id": settings.id, **settings.run(options.work)}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(found)}\n")
        print(found["id"], found["right"], found["cpu_s"], flush=True)


if __name__ == "__main__":
    main()
