"""Helpers that read the dependencies from the project's files."""

from __future__ import annotations

import re

from tests.conftest import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # tomllib is new in Python 3.11
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def lines_of(name):
    """Return the lines of a file of the project, without comments and blank lines."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def name_of(requirement):
    """Return the name in a requirement, normalized like the names in package indexes."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]*", requirement)[0].lower())


def normal(requirement):
    """Return the name in a requirement and the set of its version specifiers."""
    name, rest = re.fullmatch(r"([A-Za-z0-9._-]+)(.*)", requirement.replace(" ", "")).groups()
    return name.lower(), frozenset(filter(None, rest.split(",")))


def core_requirements(requirements):
    """Return the requirements of a distribution that belong to no extra, each as the pair that `normal` returns."""
    return {normal(requirement) for requirement in requirements if "extra ==" not in requirement}
