"""Tests of the distributions: the source contains the whole project and works; the wheel contains only the package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest

import pytorchrl
from tests.conftest import ROOT, process_environment
from tests.unit.packaging.project import core_requirements, lines_of, normal

# One process builds both distributions for all tests of this file.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributions"), pytest.mark.timeout(600)]
_NOT_OF_THE_PROJECT = re.compile(
    r"(^|/)(\.(?!ci/|gitignore)|__pycache__/|[^/]*\.egg-info/)|^(build|dist|runs|docs/_build)/")


def project_files():
    """Return the paths of the files that git tracks, or of all files if git tracks none (in a source distribution)."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True,
                            check=False).stdout.splitlines()
    found = listed or [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*")]
    return sorted(path for path in found if (ROOT / path).is_file()
                  and not (_NOT_OF_THE_PROJECT.search(path) and not listed))


def run(*command, cwd, **environment):
    """Run a command with this interpreter and return its output."""
    result = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True, check=False,
                            timeout=300,
                            env={**process_environment(), "PYTHONWARNINGS": "default", **environment})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the distributions from a copy without earlier build results, and unpack the source distribution."""
    folder = tmp_path_factory.mktemp("distributions")
    for path in project_files():
        (folder / "copy" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / "copy" / path)
    run("-m", "build", "--no-isolation", "--outdir", folder, folder / "copy", cwd=folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    # Of the functions that unpack, some versions of Python lack the filter, and others warn when it is not passed.
    run("-m", "tarfile", "--extract", sdist, folder, cwd=folder)
    return SimpleNamespace(wheel=wheel, source=folder / sdist.name.removesuffix(".tar.gz"))


def test_the_source_distribution_has_every_file_of_the_project(built):
    packed = {path.relative_to(built.source).as_posix() for path in built.source.rglob("*") if path.is_file()}
    assert sorted(set(project_files()) - packed) == []
    made = {"PKG-INFO", "setup.cfg"}
    assert sorted(path for path in packed - set(project_files()) - made
                  if not path.startswith("pytorchrl.egg-info/")) == []


def test_the_wheel_contains_only_the_package(built):
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"pytorchrl-{pytorchrl.__version__}.dist-info/METADATA").decode()
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert core_requirements(required) == {normal(line) for line in lines_of("requirements.txt")}
    in_package = {path for path in project_files() if path.startswith("pytorchrl/")}
    assets = {f"pytorchrl/monitor/assets/{name}" for name in ("charts.js", "uplot/uPlot.js", "uplot/LICENSE")}
    assert {"pytorchrl/py.typed", "pytorchrl/agent/names_elsewhere.json", *assets} <= in_package
    assert in_package <= names
    assert not [name for name in names if not name.startswith("pytorchrl")]


def test_the_unpacked_source_can_be_installed_as_in_the_readme(built, tmp_path):
    """Check that the README's command installs the unpacked source.

    Without an index, pip cannot install dependencies, but it still reads the constraints that the command names.
    """
    (command,) = re.findall(r"^ {4}pip install (-c constraints\.txt) -e '\.\[",
                            (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    target = tmp_path / "installed"
    run("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--no-compile",
        "--target", target, *command.split(), ".", cwd=built.source)
    where, version = run("-c", "import pytorchrl; print(pytorchrl.__file__, pytorchrl.__version__)", cwd=tmp_path,
                         PYTHONPATH=str(target)).split()
    assert where == str(target / "pytorchrl" / "__init__.py")
    assert run("-m", "pytorchrl", "--version", cwd=tmp_path, PYTHONPATH=str(target)) == f"pytorchrl {version}\n"


def test_tests_of_the_unpacked_source_run(built):
    printed = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/files/test_lines.py",
                  "tests/unit/packaging/test_readme.py::test_the_readme_is_short", cwd=built.source,
                  PYTHONPATH=str(built.source))
    assert re.search(r"^\d+ passed in ", printed, re.MULTILINE), printed
