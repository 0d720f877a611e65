"""Write the Jupyter copies of the notebooks, and execute the notebooks at full size.

    python docs/_ext/notebooks.py sync
    python docs/_ext/notebooks.py execute [NAME]

A notebook is stored as text in docs/notebooks/NAME.md. `sync` writes NAME.ipynb, which has the same cells and no
outputs. `execute` sets PYTORCHRL_NOTEBOOKS=full, executes the text in an empty folder, and writes the result to
docs/_build/notebooks/NAME.ipynb.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
EXECUTED = FOLDER.parent / "_build" / "notebooks"


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


def jupyter_copy(name: str) -> str:
    """Return the contents of the file NAME.ipynb."""
    return nbformat.writes(notebook_of(name)) + "\n"


def execute(name: str) -> None:
    """Execute a notebook at full size, print the progress, and write the result, also after an error."""
    notebook, start = notebook_of(name), time.monotonic()

    def report(cell: Any, cell_index: int) -> None:
        if cell.cell_type == "code":
            print(f"{name}: cell {cell_index + 1} of {len(notebook.cells)}, {time.monotonic() - start:.0f} s",
                  flush=True)

    EXECUTED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=None, kernel_name="python3", on_cell_start=report,
                                resources={"metadata": {"path": folder}})
        try:
            client.execute(env={**os.environ, "PYTORCHRL_NOTEBOOKS": "full"})
        finally:
            nbformat.write(notebook, EXECUTED / f"{name}.ipynb")
    print(f"{EXECUTED / name}.ipynb: executed in {time.monotonic() - start:.0f} s", flush=True)


def main(command: str = "", *selected: str) -> int:
    """Execute one command; return the exit code."""
    unknown = sorted(set(selected) - set(names()))
    if command not in ("sync", "execute") or unknown:
        print(f"notebooks.py: got {[command, *selected]}, but expected sync or execute, and names among "
              f"{', '.join(names())}", file=sys.stderr)
        return 2
    for name in selected or names():
        if command == "execute":
            execute(name)
        else:
            (FOLDER / f"{name}.ipynb").write_text(jupyter_copy(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
