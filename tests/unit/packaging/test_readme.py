"""Test that the Python code in the README runs, with less training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[3] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL) if README.exists() else []


def test_there_is_something_to_run():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("block", BLOCKS, ids=["train", "compose", "own parts"])
def test_python_of_the_readme_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert all(int(steps) <= 100_000 for steps in re.findall(r"target_steps=([\d_]+)", block))
    shorter, count = re.subn(r"target_steps=[\d_]+", "target_steps=300", block)
    assert count == 1
    code = compile(shorter.replace("evaluate(100)", "evaluate(2)"), str(README), "exec")
    for _ in range(2):  # readers may run the code again
        exec(code, {})
        assert float(capsys.readouterr().out) > 0
