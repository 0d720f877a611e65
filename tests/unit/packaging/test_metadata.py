"""Tests that build files, installed metadata and documentation agree with each other."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import stat
import subprocess
import sys

import pytest
import yaml

import pytorchrl
from tests.conftest import ROOT
from tests.unit.packaging.project import core_requirements, lines_of, normal

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not run from a checkout")


def test_installed_requirements_match_the_file():
    installed = importlib.metadata.requires("pytorchrl")
    assert core_requirements(installed) == {normal(line) for line in lines_of("requirements.txt")}


def test_requirements_are_ranges_without_pip_options():
    for line in lines_of("requirements.txt"):
        assert not line.startswith("-")
        assert "==" not in line


def test_every_install_command_pins_torch():
    assert any(line.startswith("torch==") for line in lines_of("constraints.txt"))
    for name in ("Makefile", "README.md", "docs/install.md"):
        for line in lines_of(name):
            if re.search(r"pip install", line) and "constraints" not in line:
                assert "PIP_INSTALL" in line, f"{name}: {line}"


def test_torch_can_be_installed_from_its_cpu_index():
    """Check that `TORCH_INDEX` and the pages install the pinned torch first, from the same package index."""
    def commands(*variables):
        command = ["make", "--no-print-directory", "-n", "-B", "venv", "VENV=/nowhere", *variables]
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        return [line.partition(" -m pip install ")[2] for line in lines if " -m pip install " in line]
    plain, (torch, package) = commands(), commands(f"TORCH_INDEX={CPU_INDEX}")
    assert plain == [package]
    assert "-e" in package
    assert CPU_INDEX not in package
    assert torch.endswith(f"-c constraints.txt torch --index-url {CPU_INDEX}")
    for name in ("README.md", "docs/install.md"):
        lines = [line.strip("$ ") for line in lines_of(name)]
        first, second = [line for line in lines if line.startswith("pip install")]
        assert first.partition("    #")[0] == f"pip install --index-url {CPU_INDEX} -c constraints.txt torch"
        assert second.startswith("pip install -c constraints.txt -e ")
    for name in ("README.md", "docs/install.md", "CONTRIBUTING.md"):
        assert f"`make TORCH_INDEX={CPU_INDEX} " in (ROOT / name).read_text(encoding="utf-8")


def test_version_is_the_same_everywhere():
    assert importlib.metadata.version("pytorchrl") == pytorchrl.__version__
    assert f"## {pytorchrl.__version__.partition('.dev')[0]}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_all_documented_extras_exist():
    extras = set(importlib.metadata.metadata("pytorchrl").get_all("Provides-Extra"))
    assert extras >= {"atari", "box2d", "mujoco", "envpool", "compress", "tensorboard", "plots", "cli", "video",
                      "docs", "dev"}


def test_setup_has_two_lines():
    assert lines_of("setup.py") == ["from setuptools import setup", "setup()"]


def test_ci_calls_only_make_and_is_executable():
    path = ROOT / ".ci" / "run"
    assert path.stat().st_mode & stat.S_IXUSR
    lines = [re.sub(r"^timeout \S+ \d+ ", "", line) for line in lines_of(".ci/run")]
    commands = [line for line in lines if line.startswith("make")]
    assert [line.split()[:2] for line in commands] == [
        ["make", "lint"], ["make", "docs"], ["make", "test-emulated-gpu"], ["make", "test"]]
    assert not re.search(r"pytest\s+-|ruff|mypy|pip ", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("lint", "docs", "emulated"), [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1)])
@pytest.mark.parametrize(("tests", "closing"), [
    (0, "3 passed in 0.10s"), (1, "1 failed, 2 passed in 0.10s"), (2, "1 error in 0.10s"),
    (5, "no tests ran in 0.01s")])
def test_ci_fails_with_any_gate_and_ends_with_the_closing_line(tmp_path, lint, docs, emulated, tests, closing):
    """Check that CI runs all gates, even after a gate has failed, and ends with the summary line of the tests."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text(
        f"lint:\n\t@echo linted; exit {lint}\ndocs:\n\t@echo built; exit {docs}\n"
        f"test-emulated-gpu:\n\t@echo emulated; echo '7 passed in 0.10s'; exit {emulated}\n"
        f"test:\n\t@echo tested; echo '{closing}'; echo more; exit {tests}\n")
    result = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines()
    assert lines.index("linted") < lines.index("built") < lines.index("emulated") < lines.index("tested")
    assert lines[-1] == closing
    assert (result.returncode == 0) == (lint == docs == emulated == tests == 0)
    assert any("the documentation failed" in line for line in lines) == bool(docs)
    assert any("lint or types failed" in line for line in lines) == bool(lint)
    assert any("tests on the emulated GPU failed" in line for line in lines) == bool(emulated)


CHECKS = ["-m ruff check .", "-m mypy pytorchrl", "-m codespell_lib", "docs/_ext/check_links.py"]


@pytest.mark.parametrize("failing", [[], *([check] for check in CHECKS), CHECKS])
def test_lint_runs_all_checks_and_fails_with_any(tmp_path, failing):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho \"$*\"\ncase \"$*\" in " + "".join(f"'{check}') exit 3;; "
                                                                          for check in failing) + "esac\n")
    python.chmod(0o755)
    for stamp in (".stamp", ".stamp-dev"):
        (tmp_path / stamp).touch()
    result = subprocess.run(["make", "--no-print-directory", "lint", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True,
                            text=True, check=False)
    assert result.stdout.splitlines() == CHECKS
    assert (result.returncode == 0) == (not failing)


def test_hooks_before_a_commit_run_the_checks_of_lint():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == [f".venv/bin/python {check}" for check in CHECKS]
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in hooks)


@pytest.mark.parametrize(("check", "path", "defect"), [
    ("-m ruff check", "tests/test_planted.py", "import os\n"),
    ("-m ruff check", "tests/test_planted.py", f"A = {'1 + ' * 40}1\n"),
    ("-m mypy", "pytorchrl/planted.py", "def planted() -> int:\n    return 'one'\n"),
    ("-m codespell_lib", "docs/planted.md", "An enviroment.\n"),  # codespell:ignore enviroment
])
def test_a_planted_defect_stops_its_check(tmp_path, check, path, defect):
    """Check that each checker accepts an empty file and rejects a defect, with the settings of the repository."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    planted = tmp_path / path
    planted.parent.mkdir()
    command = [sys.executable, *check.split(), *([] if "codespell" in check else [path])]
    for text, is_clean in (("", True), (defect, False)):
        planted.write_text(text, encoding="utf-8")
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (result.returncode == 0) == is_clean, result.stdout + result.stderr


def test_commands_and_paths_in_contributing_and_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for name in ("CONTRIBUTING.md", "README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        commands = re.findall(r"(?:^ {4}|`)make ([a-z -]+)", text, re.MULTILINE)
        assert {word for command in commands for word in command.split()} <= targets, name
        for path in re.findall(
            r"`((?:pytorchrl|tests|docs|examples)/(?!_build)[\w/.]*|[A-Z]+\.md|constraints\.txt|\.ci/run)`", text):
            assert (ROOT / path).exists(), f"{name}: {path}"
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 60


def test_installed_versions_of_checkers_equal_their_pins():
    pins = dict(line.split("==", 1) for line in lines_of("constraints.txt"))
    for name in ("ruff", "mypy", "codespell", "jupytext", "pytest", "pytest-timeout", "pytest-xdist"):
        assert importlib.metadata.version(name) == pins[name]
    for name in ("sphinx", "furo", "myst-nb"):  # newer versions of these packages need a newer Python
        assert sys.version_info < (3, 11) or importlib.metadata.version(name) == pins[name].partition(";")[0]


def test_make_help_lists_every_target():
    result = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("venv", "train", "test", "test-all", "test-emulated-gpu", "lint", "docs", "notebooks",
                   "notebooks-sync", "bench"):
        assert re.search(rf"make {target}\s+\S", result.stdout), target


def test_make_bench_names_a_task():
    result = subprocess.run(["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "benchmarks/throughput.py cartpole" in result.stdout
