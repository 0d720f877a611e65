"""Tests of the gallery: each figure exists and has a command, and each script that a command runs exists."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
COMMANDS = [line.removeprefix("$ ") for body in re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
            for line in body.splitlines()]


@pytest.mark.parametrize("title", SECTIONS)
def test_each_section_has_a_command_and_at_most_one_figure(title):
    figures = re.findall(r"\{figure\} (\S+)", SECTIONS[title])
    assert len(figures) <= 1
    assert all((ROOT / "docs" / figure).is_file() and figure.endswith(".svg") for figure in figures)
    assert re.search("^```(bash|console)$", SECTIONS[title], re.MULTILINE)


def test_there_are_figures():
    assert TEXT.count("{figure}") >= 6


@pytest.mark.parametrize("command", COMMANDS)
def test_each_script_exists_and_declares_the_flags(command):
    program, script, *arguments = shlex.split(command)
    path = ROOT / ("pytorchrl/cli" if program == "pytorchrl" else "") / f"{script.removesuffix('.py')}.py"
    assert program in {"pytorchrl", "python"}
    source = path.read_text(encoding="utf-8")
    for flag in [argument for argument in arguments if argument.startswith("-")]:
        assert f'"{flag}"' in source, flag
