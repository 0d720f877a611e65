"""Tests that the code on the pages runs as it is shown.

All ```python blocks of a page form one script, which runs in a separate process and an empty folder. If the first line
of a ```python block is a comment with a file name, the block is instead written to that file in the folder. The text of
a ```text block must occur in the script's output. Then the `pytorchrl` commands of ```bash blocks are run in the same
process and folder. ```console blocks (with a prompt) are not run, because they install packages or
train for minutes. ```sh scripts and ```yaml files need several machines, so only their syntax is checked. ```toml files
name a project of the reader's own, so only the names of their options are checked.

Training on a page is shortened to `FEW_STEPS` and a tenth of the env steps, and at most to `MOST_STEPS`. A run that
continues another one therefore still trains for longer. `MORE_STEPS` has the pages whose results need more steps. Loops
over updates are shortened to `MOST_UPDATES`, so a page may assert the data of at most this number of updates.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from functools import partial

import pytest
import yaml

from pytorchrl.training.composition import option_specs
from tests.conftest import ROOT, process_environment
from tests.docs.simulators import stand_ins
from tests.unit.packaging.project import tomllib

DOCS = ROOT / "docs"
_BLOCK = re.compile(r"^```([^`\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")
# Notebooks are executed when the site is built, and the API reference contains no code to run.
PAGES = sorted(
    path for path in [*DOCS.rglob("*.md"), ROOT / "README.md"]
    if path.is_file() and not {"_build", "notebooks"} & set(path.relative_to(ROOT).parts))
# Each section of these pages needs other packages; a test of its own runs the sections whose packages are installed.
IN_SECTIONS = {"environment_packages.md"}
# Pages with simulators; small modules take the place of those that are not installed.
WITH_SIMULATORS = {"tensor_environments.md"}
USE_RAY = {"reproducibility.md", "scaling.md"}
# Numbers of env steps from which the shorter training is computed.
FEW_STEPS, MOST_STEPS = 50, 150
MORE_STEPS = {"comparing_runs.md": 300, "index.md": 50_000, "README.md": 50_000, "scaling.md": 1_000}
# Pages whose output has numbers that differ between machines.
NUMBERS_VARY = {"index.md", "README.md"}
_STEPS = re.compile(r"(\btarget_steps ?= ?|--target-steps )([\d_]+)")
# Most updates of a loop that calls `step` until a scheme has made a number of updates.
MOST_UPDATES = 8
_UPDATES = re.compile(r"(\.version < )(\d+)")
# Time limit of each process in seconds; a busy machine takes ten times as long as an idle one.
TIMEOUT_S = 300
pytestmark = pytest.mark.timeout(600)

COMMANDS_FOLLOW = "(commands follow)"
# Runs the script of a page, and then its commands like `python -m pytorchrl`, until one fails.
PAGE = """
import functools, json, runpy, sys

script, commands, separator = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
sys.argv = [script]
if "onnx" in open(script).read():  # all exports share one list of operators, because each would build it again
    from torch.onnx._internal.exporter import _registration
    operators = _registration.onnxscript_apis
    operators.get_torchlib_ops = functools.cache(operators.get_torchlib_ops)
runpy.run_path(script, run_name="__main__")
print(separator, flush=True)
for arguments in commands:
    sys.argv = ["pytorchrl", *arguments]
    try:
        runpy.run_module("pytorchrl", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            sys.exit(f"{arguments}: exit code {ended.code}")
"""


def blocks(text, language):
    return [body for found, body in _BLOCK.findall(text) if found == language]


def files_of(text):
    """Return name -> content of the Python blocks that are separate files."""
    return {found[1]: body for body in blocks(text, "python") if (found := _FILE.match(body))}


def shortened(text, at_least=0):
    """Return a text in which each `target_steps` is at most `MOST_STEPS` or `at_least`; greater ones are greater."""
    def fewer(found):
        steps = int(found[2])
        return f"{found[1]}{min(steps, max(at_least, min(FEW_STEPS + steps // 10, MOST_STEPS)))}"
    return _UPDATES.sub(lambda found: f"{found[1]}{min(int(found[2]), MOST_UPDATES)}", _STEPS.sub(fewer, text))


def script_of(text):
    """Return the Python blocks at their original line numbers, with all other lines empty."""
    lines = [""] * (text.count("\n") + 1)
    for block in _BLOCK.finditer(text):
        if block.group(1) == "python" and not _FILE.match(block.group(2)):
            first = text.count("\n", 0, block.start(2))
            body = block.group(2).splitlines()
            lines[first:first + len(body)] = body
    return "\n".join(lines) + "\n"


def commands_of(text):
    joined = "".join(blocks(text, "bash")).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip()]


def pages_with_code():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page.name not in IN_SECTIONS and (blocks(text, "python") or commands_of(text)):
            marks = [pytest.mark.ray] * (page.name in USE_RAY)
            yield pytest.param(page, id=page.relative_to(ROOT).as_posix(), marks=marks)


@pytest.mark.parametrize("page", list(pages_with_code()))
def test_code_of_page_runs(page, request, tmp_path):
    variables = {"FORK_EXECUTABLE": request.getfixturevalue("forked_python")}  # processes of the page are forks, too
    if page.name in USE_RAY:
        variables["RAY_ADDRESS"] = request.getfixturevalue("shared_ray").get_runtime_context().gcs_address
    run = partial(request.getfixturevalue("run_forked"), env=process_environment(**variables))
    text = shortened(page.read_text(encoding="utf-8"), MORE_STEPS.get(page.name, 0))
    script = tmp_path / page.name
    script.write_text(script_of(text), encoding="utf-8")
    modules = stand_ins() if page.name in WITH_SIMULATORS else {}
    for name, content in (files_of(text) | modules).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    commands = [shlex.split(command) for command in commands_of(text)]
    assert {program for program, *_ in commands} <= {"pytorchrl"}, "bash blocks may contain only pytorchrl commands"
    result = run("-c", PAGE, script, json.dumps([arguments for _, *arguments in commands]), COMMANDS_FOLLOW,
                 timeout=TIMEOUT_S)
    assert result.returncode == 0, result.stderr
    printed, separator, _ = result.stdout.partition(f"{COMMANDS_FOLLOW}\n")
    assert separator
    without_numbers = partial(re.sub, r"\d+(\.\d+)?", "N") if page.name in NUMBERS_VARY else str
    for shown in blocks(text, "text"):
        assert without_numbers(shown) in without_numbers(printed)


def test_pages_have_code_to_run():
    names = {param.id for param in pages_with_code()}
    assert names >= {f"docs/{name}.md" for name in (
        "index", "quickstart", "worker_tree", "compose", "scaling", "ledger", "reproducibility", "command_line")}


def test_every_code_block_has_a_known_language():
    for page in PAGES:
        found = {info for info, _ in _BLOCK.findall(page.read_text(encoding="utf-8"))}
        languages = {info for info in found if not info.startswith("{")}  # the other blocks are Sphinx directives
        assert languages <= {"python", "text", "bash", "console", "sh", "toml", "yaml"}, page


def test_configurations_on_pages_name_options_of_train():
    found = [body for page in PAGES for body in blocks(page.read_text(encoding="utf-8"), "toml")]
    assert found
    for body in found:
        assert tomllib.loads(body).keys() <= {"algorithm", "env", "callbacks", *option_specs("ppo")}


def test_shell_scripts_and_yaml_files_on_pages_have_valid_syntax():
    found = {language: [body for page in PAGES for body in blocks(page.read_text(encoding="utf-8"), language)]
             for language in ("sh", "yaml")}
    for script in found["sh"]:
        assert script.startswith("#!/bin/bash")
        result = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert (result.returncode, result.stderr) == (0, "")
    for file in found["yaml"]:
        assert yaml.safe_load(file)["kind"] == "RayJob"
    assert all(found.values())


def test_training_is_shortened():
    assert shortened("train(target_steps=20_000, size=90_000)") == "train(target_steps=150, size=90_000)"
    assert shortened("train --target-steps 1000 --size 9000") == "train --target-steps 150 --size 9000"
    assert shortened("target_steps = 3_000", 1_500) == "target_steps = 1500"
    assert shortened("target_steps = 500") == "target_steps = 100"
    assert shortened("Learner(scheme, target_steps=50)") == "Learner(scheme, target_steps=50)"
    assert shortened("while scheme.version < 40:") == "while scheme.version < 8:"
    assert shortened("while scheme.version < 5:") == "while scheme.version < 5:"


def test_script_keeps_line_numbers_of_the_page():
    page = ("# Page\n\n```python\na = 1\n```\n\n```{note}\nno code\n```\n\n```text\nneither\n```\n\n"
            "```python\nb = 2\n```\n")
    assert script_of(page).splitlines()[3] == "a = 1"
    assert script_of(page).splitlines()[15] == "b = 2"
    assert files_of("```python\n# part.py\nc = 3\n```\n" + page) == {"part.py": "# part.py\nc = 3\n"}
    assert script_of(page).split() == ["a", "=", "1", "b", "=", "2"]
