"""Tests that each mistake of a user is shown on one screen: the message, the frames of the user's code, the message."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import sys
import traceback

import pytest

from pytorchrl.errors import (
    CallbackError,
    ConfigError,
    EnvError,
    PyTorchRLError,
    SpaceError,
    StartError,
    WorkerLostError,
)
from pytorchrl.support.tracebacks import VARIABLE
from tests.conftest import ROOT
from tests.unit.support.conftest import without_forks_frames

LINES = 25
PROCESSES = {"num_col_workers": 2, "runtime": "processes"}
# Mistakes in the user's own code: the error, its cause, and the functions of the user that are shown.
IN_USERS_CODE = {
    "env raise": (EnvError, KeyError, ["step", "advance", "integrate"]),
    "env built": (EnvError, KeyError, ["__init__", "advance", "integrate"]),
    "reward": (EnvError, KeyError, ["reward_of", "advance", "integrate"]),
    "network": (RuntimeError, None, ["forward", "hidden"]),
    "loss": (AttributeError, None, ["terms", "of_advantages"]),
    "callback": (CallbackError, FileNotFoundError, ["on_step", "write"]),
}
OTHERS = {
    "option": (ConfigError, {}),
    "space": (SpaceError, {}),
    "disk": (OSError, {}),
    "killed": (WorkerLostError, PROCESSES),
    "no ray": (StartError, {"num_col_workers": 2, "runtime": "ray"}),
}


@pytest.fixture(scope="module")
def benchmark():
    """Return the module benchmarks/errors.py, which contains the mistakes."""
    spec = importlib.util.spec_from_file_location("errors_of_users", ROOT / "benchmarks" / "errors.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")  # the script imports another module of its folder
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script(benchmark, tmp_path_factory):
    """Return the script of a user that makes the mistakes, as a module."""
    folder = tmp_path_factory.mktemp("users")
    benchmark.write_files(folder)
    names = [name.removesuffix(".py") for name in benchmark.FILES]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield [importlib.import_module(name) for name in names][names.index("script")]
    for name in names:
        del sys.modules[name]


@pytest.fixture
def shown(benchmark, script, caplog, monkeypatch, tmp_path):
    """Return a function that makes a mistake, and returns the error and the lines that a terminal shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", sys.modules.get("ray"))  # `options_of` replaces the module and the function
    monkeypatch.setattr(os, "fsync", os.fsync)

    def make(case, driver, settings):
        options = script.options_of(case, settings)
        with pytest.raises((Exception, SystemExit)) as caught:
            script.DRIVERS[driver](options)
        text = "".join([*(f"{message}\n" for message in caplog.messages), *traceback.format_exception(caught.value)])
        return caught.value, lines_of(benchmark, text, os.path.dirname(script.__file__))
    return make


def lines_of(benchmark, text, folder):
    """Return the lines of a text in a terminal, as if the user's files were in a folder with a short name."""
    return benchmark.lines_of(text.replace(str(folder), "/home/ann/maze"))


def functions_in(error, folder):
    """Return the functions in the files of a folder, and the files of other functions, in the order of the output."""
    found, chain = [], [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    for each in reversed(chain):
        found += [(frame.name, frame.filename) for frame in traceback.extract_tb(each.__traceback__)]
    return ([name for name, file in found if file.startswith(folder)],
            [file.rpartition("/")[2] for _, file in found if not file.startswith(folder)])


@pytest.mark.parametrize(("case", "place", "driver"), [
    *((case, place, "train") for case in IN_USERS_CODE for place in ("process", "processes")),
    ("env raise", "processes", "learner"), ("network", "process", "learner"), ("callback", "process", "learner"),
    ("env raise", "processes", "scheme"), ("env raise", "process", "scheme"), ("loss", "process", "scheme"),
])
def test_an_error_in_the_users_code_fills_one_screen(shown, script, request, case, place, driver):
    if place == "processes":
        request.getfixturevalue("quick_processes")
    kind, cause, functions = IN_USERS_CODE[case]
    error, lines = shown(case, driver, {"process": {}, "processes": PROCESSES}[place])
    assert type(error) is kind
    assert type(error.__cause__) is (type(None) if cause is None else cause)
    assert len(lines) <= LINES
    text = "\n".join(lines)
    sentence = traceback.format_exception_only(error)[-1].rstrip("\n").removeprefix(f"{kind.__module__}.")
    first = sentence.removeprefix(f"{kind.__name__}: ") if issubclass(kind, PyTorchRLError) else sentence
    assert lines[0] == first[:len(lines[0])]
    assert "".join(lines).endswith(sentence)
    assert text.count(f"# {VARIABLE}=1 shows all frames") == 1
    names, others = functions_in(error, os.path.dirname(script.__file__))
    start = [{"train": "train", "learner": "learn", "scheme": "loop"}[driver]]
    assert names == (functions + start if cause is not None else start + functions)
    assert others == ["test_errors_on_one_screen.py", "tracebacks.py"]
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, str(error))


@pytest.mark.parametrize("case", OTHERS)
def test_every_other_mistake_fills_one_screen(shown, request, case):
    kind, settings = OTHERS[case]
    if settings == PROCESSES:
        request.getfixturevalue("quick_processes")
    error, lines = shown(case, "train", settings)
    assert type(error) is kind
    assert len(lines) <= LINES
    assert error.__cause__ is None
    assert "".join(lines).endswith(str(error))
    assert f"# {VARIABLE}=1 shows all frames" in "\n".join(lines)


def test_all_frames_are_shown_on_request(shown, monkeypatch, quick_processes):
    monkeypatch.setenv(VARIABLE, "1")
    error, lines = shown("env raise", "train", PROCESSES)
    assert len(lines) > 3 * LINES
    text = "\n".join(lines)
    assert "guard.py" in text, "a frame of the worker's process"
    assert "learner.py" in text
    assert type(error.__cause__) is KeyError


def test_the_command_line_shows_the_users_frames(benchmark, run_forked, tmp_path):
    benchmark.write_files(tmp_path)
    done = run_forked(*benchmark.arguments_of("env raise", "process", "command"))
    assert (done.returncode, len(lines_of(benchmark, done.stderr, tmp_path)) <= LINES) == (2, True)
    lines = done.stderr.splitlines()
    assert lines[0].startswith("GWorker 0/CWorker 0, env 0: step raised after 6 steps")
    assert lines[-1] == f"pytorchrl: error: {lines[0]}"
    assert re.findall(r"  File .*, in (\w+)", done.stderr) == ["step", "advance", "integrate"]
    assert lines[-4:-1] == ["KeyError: 6", "", "--debug shows all frames"]


def test_a_script_prints_the_same_and_a_restart_its_traceback_once(benchmark, run_forked, tmp_path):
    benchmark.write_files(tmp_path)
    done = run_forked(*benchmark.arguments_of("env", "process", "train"))
    head, *blocks = done.stderr.split("Traceback (most recent call last):")
    assert "restart 1 of its environments" in head
    assert [block.count("in integrate") for block in blocks] == [1, 1, 0]
    assert [block.count("restart 3 of its environments") for block in blocks] == [1, 0, 0]
    assert [block.count("not restarted") for block in blocks] == [1, 0, 1]


@pytest.mark.ray
def test_an_error_on_ray_fills_one_screen(benchmark, run_on_ray, tmp_path):
    benchmark.write_files(tmp_path)
    done = run_on_ray(*benchmark.arguments_of("env raise", "ray", "train"), timeout=100)
    shown = without_forks_frames(done.stderr)
    assert len(lines_of(benchmark, shown, tmp_path)) <= LINES
    lines = shown.splitlines()
    assert lines[0].startswith("GWorker 0/CWorker")
    assert lines[-1] == f"pytorchrl.errors.EnvError: {lines[0]}"
    assert re.findall(r"  File .*, in (.+)", shown) == [
        "step", "advance", "integrate", "<module>", "train", "entry"]
