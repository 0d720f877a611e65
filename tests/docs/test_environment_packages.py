"""Tests that the code on the page about environments of other packages runs, section by section.

A section is skipped unless all packages that it needs are installed. Each section trains, evaluates and saves an agent,
and some load it; then `pytorchrl enjoy` plays an episode with every run of the section.
"""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from tests.conftest import ROOT, process_environment
from tests.docs.test_docs_code import (
    COMMANDS_FOLLOW, IN_SECTIONS, PAGE, TIMEOUT_S, blocks, files_of, script_of, shortened)
from tests.unit.packaging.project import EXTRAS, name_of

(NAME,) = IN_SECTIONS
TEXT = (ROOT / "docs" / NAME).read_text(encoding="utf-8")
SECTIONS = {found[1]: found[2] for found in re.finditer(r"^## (.*)\n((?:(?!## ).*\n)*)", TEXT, re.MULTILINE)}
# Heading of a section -> modules that it needs.
MODULES = {
    "MiniGrid": ["minigrid"], "highway-env": ["highway_env"], "Gymnasium-Robotics": ["gymnasium_robotics", "mujoco"],
    "dm_control": ["shimmy", "dm_control"], "PettingZoo": ["pettingzoo", "mpe2"], "crafter": ["crafter"],
    "gymnasium.make_vec": [], "Environments in JAX": ["jax", "flax", "array_api_compat"],
    "gymnax and Brax": ["jax", "gymnax", "brax"]}
pytestmark = pytest.mark.timeout(600)


@pytest.mark.thorough
@pytest.mark.parametrize("heading", SECTIONS)
def test_environments_of_the_package_train(heading, run_forked, forked_python, tmp_path):
    if missing := [name for name in MODULES[heading] if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed; the extra envs installs it")
    text = shortened(SECTIONS[heading])
    script = tmp_path / "script.py"
    script.write_text(script_of(text), encoding="utf-8")
    for name, content in files_of(text).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    runs = re.findall(r'log_dir="([^"]*)"', text)
    assert runs
    commands = [["enjoy", run, "--episodes", "1", "--trust"] for run in runs]
    result = run_forked("-c", PAGE, script, json.dumps(commands), COMMANDS_FOLLOW, timeout=TIMEOUT_S,
                        env=process_environment(FORK_EXECUTABLE=forked_python, MUJOCO_GL="disabled"))
    assert result.returncode == 0, result.stderr
    printed, _, played = result.stdout.partition(f"{COMMANDS_FOLLOW}\n")
    assert re.search(r"-?\d", printed)
    assert played.count("mean return of 1 evaluation episodes") == len(runs)


def test_every_section_and_package_is_listed():
    assert SECTIONS.keys() == MODULES.keys()
    assert all(blocks(body, "python") for body in SECTIONS.values())
    rows = [line.split("|")[1].lower() for line in TEXT.splitlines() if line.startswith("| [")]
    assert all(any(heading.lower() in row for row in rows) for heading in MODULES)
    packages = {name_of(requirement.partition(";")[0].strip()).partition("[")[0] for requirement in EXTRAS["envs"]}
    modules = {name.replace("_", "-") for names in MODULES.values() for name in names}
    assert packages - {"gymnasium", "jax", "jaxlib"} <= modules
