"""Tests that install commands in errors and pages name the right packages, not other projects with similar names."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import shlex
from pathlib import Path

import pytest

import pytorchrl
from pytorchrl.errors import install_hint
from tests.conftest import ROOT
from tests.unit.packaging.project import EXTRAS, name_of

PACKAGE = Path(pytorchrl.__file__).parent
# The other extras are named in no error.
FOR_USERS = sorted(set(EXTRAS) - {"docs", "test", "dev", "envs"})
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py"),
                *ROOT.glob("benchmarks/*.py"),
                *PACKAGE.rglob("*.py")])


def installed_by(command):
    """Return the requirements that a pip command names; words after a comment sign do not count."""
    words = shlex.split(command, comments=True)
    assert words[:2] == ["pip", "install"], command
    taken = {"-c", "-e", "-r", "--index-url", "--extra-index-url"}
    return [word for before, word in itertools.pairwise(words[1:]) if not word.startswith("-") and before not in taken]


@pytest.mark.parametrize("extra", FOR_USERS)
def test_a_hint_installs_the_packages_of_the_extra(extra):
    listed = [requirement.partition(";")[0].strip() for requirement in EXTRAS[extra]]
    found = installed_by(install_hint(extra))
    assert [name_of(package) for package in found] == [name_of(package) for package in listed]
    assert ["[" in package for package in found] == ["[" in package for package in listed]
    assert "pytorchrl" not in map(name_of, found)


@pytest.mark.parametrize("requires", [None, []])
def test_without_metadata_the_source_folder_is_named(monkeypatch, requires):
    def requires_(name):
        if requires is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return requires
    monkeypatch.setattr(importlib.metadata, "requires", requires_)
    hint = install_hint("box2d")
    assert hint == "pip install -e '.[box2d]' in the source folder"
    assert installed_by(hint.removesuffix(" in the source folder")) == []


def test_no_command_installs_this_project_by_its_name():
    commands = []
    for path in PAGES:
        for command in re.findall(r"pip install [^`\n]*", path.read_text(encoding="utf-8")):
            commands.append(command)
            assert not re.search(r"(?<![\w./])['\"]?pytorchrl\b", command), f"{path}: {command}"
    assert len(commands) >= 5


def test_install_hints_come_from_one_function():
    """Check that `pip install` commands are written only in `errors.py`; other modules call `install_hint`."""
    homes = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")
             if "pip install" in path.read_text(encoding="utf-8")}
    assert homes == {"errors.py"}
