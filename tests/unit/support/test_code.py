"""Tests of errors about modules that cannot be imported."""

import importlib
import sys

import gymnasium as gym
import pytest

from pytorchrl.agent.env import VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError, install_hint
from pytorchrl.support.code import import_extra, import_module

ABSENT = "absent"
# Text of a module -> why it cannot be imported, and what the error advises.
BROKEN = {
    "import absent_package.part": ("No module named 'absent_package'", "install the package that contains absent_pack"),
    "import json.absent": (r"No module named 'json\.absent'", "install versions of its packages that fit each other"),
    "from json import absent": ("cannot import name 'absent'", "install versions of its packages that fit each other"),
}


@pytest.mark.parametrize("text", BROKEN)
def test_an_import_that_fails_is_not_always_an_absent_package(monkeypatch, tmp_path, text):
    monkeypatch.syspath_prepend(tmp_path)
    cause, advice = BROKEN[text]
    name = f"broken_{len(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"x cannot be imported \({cause}.*\); .*{advice}"):
        import_module(name, "x")
    with pytest.raises(ConfigError, match=rf"watch needs the extra `cli`: pip install 'rich' \({cause}"):
        import_extra(name, "cli", "watch")
    with pytest.raises(ConfigError, match=r"x cannot be imported \(No module named 'absent'\); run from the folder"):
        import_module(ABSENT, "x")
    (tmp_path / "absent_package").mkdir()
    (tmp_path / "absent_package" / "part.py").touch()
    (tmp_path / f"{name}.py").write_text("import absent_package.part" if "absent_package" in text else "import json")
    importlib.invalidate_caches()
    assert import_module(name, "x") is import_extra(name, "cli", "watch")
    monkeypatch.delitem(sys.modules, name)


def that_runs(text):
    """Return a function that builds an environment after it runs a text."""
    return lambda: exec(text) or CountingEnv()


def with_own_error():
    try:
        importlib.import_module("json.absent")
    except ImportError as error:
        raise gym.error.DependencyNotInstalled("mujoco is not installed") from error


def test_environments_whose_packages_do_not_fit_are_not_called_absent():
    """Check ids that moved away, versions that do not fit, and Gymnasium's own error about any import that failed."""
    for env, *parts in (
            ("Hopper-v3", "Hopper-v3 cannot be imported", "moved to", "use 'Hopper-v5', or install versions that fit"),
            (that_runs("from json import absent"), "the environment cannot be imported", "cannot import name 'absent'"),
            (that_runs("import absent"), "needs a package that is not installed (No module named 'absent')"),
            (with_own_error, "cannot be imported", "'json.absent'", f"fit each other: {install_hint('mujoco')}")):
        with pytest.raises(ConfigError) as caught:
            VecEnv.create_factory(env)(seed=1)
        assert [part for part in parts if part not in str(caught.value)] == []
