"""Tests that the traceback of an error about a wrong setting shows the caller's line and the message."""

from __future__ import annotations

import inspect
import traceback
import typing

import pytest

import pytorchrl
from pytorchrl import (
    A2C,
    PPO,
    GAEBuffer,
    Learner,
    MultiAgentVecEnv,
    OnPolicyActor,
    PERBuffer,
    ReplayBuffer,
    Scheme,
    VecEnv,
    multi_agent,
)
from pytorchrl.agent.actors import OffPolicyActor
from pytorchrl.errors import ConfigError
from pytorchrl.support.tracebacks import VARIABLE, brief_errors, full_tracebacks, shown_errors
from tests.unit.support.conftest import without_forks_frames

SCRIPT = """import pytorchrl

def main():
    pytorchrl.train("ppo", "CartPole-v1", lr=-1)

main()
"""


def frames_of(error):
    """Return the (file, function) names in the tracebacks of an error and its causes, one list per traceback."""
    shown = []
    while error is not None:
        shown.append([(frame.filename.split("/")[-1],
                       frame.name) for frame in traceback.extract_tb(error.__traceback__)])
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return shown


def test_a_script_shows_its_own_line_and_the_message(run_forked, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    lines = without_forks_frames(run_forked(script).stderr).splitlines()
    assert lines[-1] == "pytorchrl.errors.ConfigError: lr must be a number >= 0.0 or a schedule, got -1"
    assert lines[0] == "Traceback (most recent call last):"
    files = [line for line in lines if line.startswith("  File")]
    assert [file.split(", ")[-1] for file in files] == ["in <module>", "in main", "in entry"]
    assert [file for file in files if "script.py" in file] == files[:2]
    assert len(lines) <= 11  # some versions of Python add a line of markers below each line of code
    assert VARIABLE in "\n".join(lines)


def test_an_environment_variable_shows_all_frames(run_forked, tmp_path):
    (tmp_path / "script.py").write_text(f"import os\nos.environ[{VARIABLE!r}] = '1'\n{SCRIPT}")
    lines = run_forked(tmp_path / "script.py").stderr.splitlines()
    assert lines[-1] == "pytorchrl.errors.ConfigError: lr must be a number >= 0.0 or a schedule, got -1"
    assert len([line for line in lines if "in __post_init__" in line]) > 0


def test_ctrl_c_shows_the_line_of_the_script_and_what_was_saved(run_forked, tmp_path):
    (tmp_path / "script.py").write_text("""import os, signal, pytorchrl

class Interrupt(pytorchrl.callbacks.Callback):
    def on_step(self, run, info):
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
pytorchrl.train("ppo", "CartPole-v1", target_steps=800, num_envs=1, num_steps=8, num_mini_batch=1,
                callbacks=[Interrupt()])
""")
    lines = run_forked(tmp_path / "script.py").stderr.splitlines()
    assert lines[-1] == ("KeyboardInterrupt: training was interrupted after 8 env steps; nothing is saved without a "
                         "log_dir")
    files = [line for line in lines if line.startswith("  File")]
    assert "script.py" in files[-2]
    assert files[-1].endswith("in entry")


@pytest.fixture(scope="module")
def agent():
    envs = VecEnv.create_factory("CartPole-v1")
    return PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space,
                                                              envs.action_space), GAEBuffer.create_factory(8), envs


CALLS = {
    "train": lambda agent: pytorchrl.train("ppo", "CartPole-v1", num_stps=3),
    "train, unknown environment": lambda agent: pytorchrl.train("ppo", "CartPoel-v1"),
    "train, unknown algorithm": lambda agent: pytorchrl.train("pop", "CartPole-v1"),
    "Scheme": lambda agent: Scheme(*agent, num_col_workers=-1),
    "Scheme.a3c": lambda agent: Scheme.a3c(*agent, num_grad_workers=1),
    "Learner": lambda agent: Learner(Scheme(*agent), target_steps=-1),
    "Learner.evaluate": lambda agent: Learner(Scheme(*agent), target_steps=1).evaluate(0),
    "multi_agent": lambda agent: multi_agent(agent[-1], agent[0], agent[1], agent[2]),
    "VecEnv": lambda agent: VecEnv.create_factory("CartPoel-v1"),
    "MultiAgentVecEnv": lambda agent: MultiAgentVecEnv.create_factory(3),
    "PPO": lambda agent: PPO.create_factory(lr=-1),
    "A2C": lambda agent: A2C.create_factory(learn=1),
    "OnPolicyActor": lambda agent: OnPolicyActor.create_factory(1, 2),
    "OffPolicyActor": lambda agent: OffPolicyActor.create_factory(1, 2),
    "GAEBuffer": lambda agent: GAEBuffer.create_factory(0),
    "ReplayBuffer": lambda agent: ReplayBuffer.create_factory(0),
    "PERBuffer": lambda agent: PERBuffer.create_factory(0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_public_calls_show_one_frame_of_the_package_and_no_cause(agent, call):
    with pytest.raises(ConfigError) as caught:
        call(agent)
    (*_, last), *causes = frames_of(caught.value)
    assert frames_of(caught.value)[0][-2:] == [("test_tracebacks.py", "<lambda>"), ("tracebacks.py", "entry")]
    assert last == ("tracebacks.py", "entry")
    assert causes == []
    with full_tracebacks(), pytest.raises(ConfigError) as caught:
        call(agent)
    assert len(frames_of(caught.value)[0]) > 3


def test_every_public_factory_shortens_tracebacks():
    factories = {name: getattr(getattr(pytorchrl, name), "create_factory", None) for name in pytorchrl.__all__}
    found = {name: factory.__func__.__code__ is PPO.create_factory.__func__.__code__ for name,
             factory in factories.items() if factory}
    assert found["SAC"]
    assert [name for name, is_brief in found.items() if not is_brief] == []


def users(kind):
    raise kind("of the user")


# Functions that look like functions of the package and call a function of the user.
OURS: dict[str, typing.Any] = {"__name__": "pytorchrl.part", "ConfigError": ConfigError}
exec("""
def caused(function):
    try:
        function()
    except Exception as error:
        raise ConfigError("made of it") from error

def caused_twice(function):
    try:
        caused(function)
    except ConfigError as error:
        raise ConfigError("made of that") from error

def caused_by_library(function):
    try:
        [].index(0)
    except ValueError as error:
        raise ConfigError("made of that") from error

def called(function):
    function()

def broken():
    divided(0)

def divided(number):
    return 1 / number
""", OURS)


@pytest.mark.parametrize(("name", "kind", "shown"), [
    ("caused", KeyError, ["entry", "users"]),
    ("caused_twice", KeyError, ["entry", "users"]),
    ("caused_by_library", KeyError, ["entry"]),
    ("called", ConfigError, ["users"]),
])
def test_frames_and_causes_of_user_code_are_kept(name, kind, shown):
    with pytest.raises(ConfigError) as caught:
        brief_errors(OURS[name])(lambda: users(kind))
    assert [frames[-1][1] for frames in frames_of(caught.value)] == shown


def test_an_error_without_a_frame_of_the_users_code_keeps_its_frames():
    with pytest.raises(ZeroDivisionError) as caught:
        brief_errors(OURS["broken"])()
    assert [name for _, name in frames_of(caught.value)[0]][-2:] == ["broken", "divided"]


def test_errors_in_calls_between_public_functions_are_shortened_once():
    inner = brief_errors(lambda: users(KeyError))
    outer = brief_errors(lambda: inner() or 1)
    with pytest.raises(KeyError) as caught:
        outer()
    assert [name for _, name in frames_of(caught.value)[0]][1:] == ["entry", "<lambda>", "<lambda>", "users"]
    with pytest.raises(KeyError) as caught:
        inner()
    assert [name for _, name in frames_of(caught.value)[0]][1:] == ["entry", "<lambda>", "users"]


def test_a_warning_of_a_scheme_points_to_the_callers_line(agent):
    with pytest.warns(UserWarning, match="col_fraction_workers < 1 has no effect") as caught:
        Scheme(*agent, col_fraction_workers=0.5)
    assert caught[0].filename == __file__


def test_signatures_and_annotations_of_public_calls_are_kept():
    assert "collection" in inspect.signature(Scheme).parameters
    assert inspect.signature(Scheme).parameters["collection"].annotation == "Collection | None"
    assert pytorchrl.train.__doc__.startswith("Train an agent")


@pytest.mark.parametrize("length", [1, 2, 3])
def test_cyclic_causes_do_not_loop_forever(length):
    errors = [ConfigError(f"number {number}") for number in range(length)]
    for number, error in enumerate(errors):
        error.__cause__ = errors[(number + 1) % length]
    assert shown_errors(errors[0]) == errors[:1]


def test_an_error_raised_from_itself_has_a_short_traceback():
    with pytest.raises(ConfigError, match=r"must return a gymnasium\.Env, got int"):
        VecEnv.create_factory(lambda: 3)
