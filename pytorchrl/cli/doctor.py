"""Implement `pytorchrl doctor RUN_DIR`: print the checklist of the page "It does not learn" for a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytorchrl.cli.output import show, show_in_red, wrapped
from pytorchrl.cli.parsing import Parser
from pytorchrl.monitor.findings import Check, checks
from pytorchrl.monitor.view import RunView, read_run

# Questions that no record answers, and the page of the documentation that helps with the answer.
QUESTIONS = (
    ("Does it learn an easy task?", "install"),
    ("Is the return the right one?", "acting"),
    ("Is the environment correct?", "own_environment"),
    ("Does the observation contain what the decision depends on?", "recurrent"),
    ("Are scales sensible?", "normalization"),
    ("Is it long enough?", "benchmarks"),
    ("Does the policy still explore?", "algorithms/ppo"),
    ("Are updates too large?", "algorithms/ppo"),
    ("Does the value function learn?", "tuning"),
    ("Is it one unlucky seed?", "comparing_runs"),
    ("Is it the scheme?", "which_scheme"),
    ("Are the options good?", "presets"),
)
# Width of the column that says whether an item is right.
_INDENT = 9


def run(arguments: Sequence[str]) -> int:
    """Print the state of each item of the checklist; return 1 if something is wrong, otherwise 0."""
    parser = Parser(prog="pytorchrl doctor", usage="pytorchrl doctor RUN_DIR",
                    description="Check a run, which may still continue, and list what only you can check. Exit codes: "
                                "0 nothing looks wrong, 1 something does.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of the run")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    found = checks_of(read_run(parser.parse(arguments).run_dir.expanduser()))
    for check in found:
        if check.wrong:
            show_in_red(*wrapped(f"{'wrong':{_INDENT}}{check.word}: {check.wrong}", _INDENT))
        else:
            show(*wrapped(f"{'unknown' if check.wrong is None else 'ok':{_INDENT}}{check.fine}", _INDENT))
    width = max(len(question) for question, _ in QUESTIONS)
    show("", *wrapped("Only you can answer the rest. The page not_learning of the documentation says how, and these "
                      "pages help:", 0),
         *(f"{number:2}  {question:{width}}  {page}" for number, (question, page) in enumerate(QUESTIONS, start=1)))
    return int(any(check.wrong for check in found))


def checks_of(view: RunView) -> list[Check]:
    """Return the checks of the files of a run, followed by those of its latest record."""
    silence = (f"no record was written for {view.age_s:,.0f} s, and the run has not ended; it was perhaps killed"
               if view.state == "silent" else None if view.state == "starting" else "")
    return [Check("files", "the files of the run can be read", "; ".join(view.problems)),
            Check("silent", "records are still written, or the run has ended", silence),
            *checks(view.latest, view.target_steps, has_ended=view.state == "ended")]
