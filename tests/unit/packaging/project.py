"""What the project's files say of its dependencies."""

from __future__ import annotations

import re

from tests.conftest import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def lines_of(name):
    """Lines of a file of the project without comments and blank lines."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def name_of(requirement):
    """The name in a requirement, as indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]*", requirement)[0].lower())


def normal(requirement):
    """A requirement's name and its set of version specifiers."""
    name, rest = re.fullmatch(r"([A-Za-z0-9._-]+)(.*)", requirement.replace(" ", "")).groups()
    return name.lower(), frozenset(filter(None, rest.split(",")))


def core_requirements(requirements):
    """Those of a distribution's metadata that no extra asks for, as `normal` gives them."""
    return {normal(requirement) for requirement in requirements if "extra ==" not in requirement}
