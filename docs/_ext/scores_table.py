"""Sphinx directive that shows the measured scores of some algorithms.

`{scores-table} crossq droq` contains the rows of `benchmarks/scores.md` in whose environments one of these algorithms
was trained, with their relatives in the same environments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import pytorchrl

_TABLE = Path(__file__).parent.parent / "benchmarks" / "scores.md"


def rows_of(algorithms: list[str], text: str) -> list[str]:
    """Return the lines of the Markdown table of the environments in which one of the algorithms was trained."""
    head, line, *rows = text.splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    envs = {env for env, name, *_ in cells if name in algorithms}
    missing = set(algorithms) - {name for _, name, *_ in cells}
    if missing:
        raise ValueError(f"{_TABLE.name} has no scores of {', '.join(sorted(missing))}")
    return [head, line, *(row for row, (env, *_) in zip(rows, cells, strict=True) if env in envs)]


class ScoresTable(SphinxDirective):
    """Directive that shows the scores of the given algorithms and of their relatives in the same environments."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the table and of a reference to the page that explains it."""
        self.env.note_dependency(str(_TABLE))
        rows = rows_of(self.arguments[0].split(), _TABLE.read_text("utf-8"))
        return self.parse_text_to_nodes("\n".join([*rows, "", "[](/benchmarks.md#scores) explains the columns."]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("scores-table", ScoresTable)
    return {"version": pytorchrl.__version__, "parallel_read_safe": True}
