"""Check that messages between processes can be pickled, including errors."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

import pytorchrl
from pytorchrl import errors
from pytorchrl.agent.data import Episode
from pytorchrl.scheme import ASYNC, CENTRAL, Communication, Evaluation, Execution, LedgerSnapshot
from pytorchrl.scheme.transport.encoder import Sent
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.gradients.process_group import Candidate, Meeting
from pytorchrl.scheme.transport.messages import Gradients, Report, Rollout, RolloutHeader, Weights, WholeState

_MESSAGES = [
    Weights(3, {"all": np.arange(4, dtype=np.float32)}, {"lr": 0.5}),
    Rollout(np.arange(6, dtype=np.uint8), RolloutHeader(
        num_env_steps=6, size=6, collected_steps=12, weights_version=3, worker=2, sequence=4, incarnation=1,
        episodes=(Episode(1.0, 2, 3.0, 0, True),), moments={"obs": (1, 2.0, 3.0)}, timings={"store": 0.5},
        preempted=True, sent=Sent(6, 5))),
    Gradients(vectors=[np.arange(4, dtype=np.float32)], num_samples=5, num_new_samples=4, weights_version=3, worker=1,
              sequence=9, info={"loss": 1.0}, ledger=LedgerSnapshot(collected=4, sent=4), last=True,
              report=Report(lags=((1, 0, 2),), counters=WorkerCounters(rollouts=1).snapshot())),
    WholeState(3, {"gradient": {"acting": {"all": np.arange(4, dtype=np.float32)}}}),
    Meeting(generation=2, address="10.0.0.1", port=4000, size=3, timeout_s=60.0),
    Candidate(version=3, incarnation=1, ledger=LedgerSnapshot(collected=4, queued=4), address="10.0.0.1", port=4000),
    LedgerSnapshot(collected=1, dropped={"nan": 1}),
    Evaluation(3, (1.0, 2.0), (10, 20)),
    WorkerCounters(rollouts=1, agent_steps={"a": 2}).snapshot(),
]
_ERRORS = [value for _, value in inspect.getmembers(errors, inspect.isclass)
           if issubclass(value, errors.PyTorchRLError)]
# Exceptions that the package itself always catches.
_CAUGHT = {"channel ClosedError", "channel FullError", "signals Unblocked", "simulation Ended", "single BuiltVector",
           "backends VectorSizeError"}
_MUTABLE = {
    # class: reason why objects of this class never are messages, batches or steps
    "agent/storages/ring.py _Head": "state of a ring buffer",
    "agent/storages/samples.py Samples": "data of one storage, from which it selects its batches",
    "agent/multi/replay.py _Kept": "state of a storage",
    "agent/multi/turns.py _Column": "rows of one agent that are still being found",
    "play/dataset.py _Episode": "episode that is still being played",
    "play/replay.py Update": "update that is still being made again",
    "runtime/base.py Future": "handle of a call, compared by identity",
    "runtime/processes/channel.py Message": "buffer from which the received value is built",
    "runtime/processes/wire.py MessageParts": "buffer in which a message is assembled",
    "scheme/counters.py WorkerCounters": "running counters of a worker; its reports contain a CounterSnapshot",
    "scheme/gradients/train_batch.py TrainBatch": "entry of the learner's sample queue, which counts its uses",
    "scheme/replay/rollouts.py _Kept": "state of a storage",
    "scheme/updates/statistics.py UpdateCounters": "running counters of the update worker",
}


def mutable_dataclasses(root):
    """Return "path class" for every dataclass below `root` that is not frozen."""
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else []:
                text = ast.unparse(decorator)
                if text.removeprefix("dataclasses.").startswith("dataclass") and "frozen=True" not in text:
                    yield f"{path.relative_to(root)} {node.name}"


def field_names(message):
    """Return the names of the fields of a dataclass or of a named tuple."""
    return getattr(message, "_fields", None) or [field.name for field in dataclasses.fields(message)]


@pytest.mark.parametrize("message", _MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("protocol", [4, 5])
def test_messages_can_be_pickled(message, protocol):
    again = pickle.loads(pickle.dumps(message, protocol))
    assert type(again) is type(message)
    for name in field_names(message):
        np.testing.assert_equal(getattr(again, name), getattr(message, name))


@pytest.mark.parametrize("message", _MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_are_frozen(message):
    with pytest.raises(AttributeError):  # of which `FrozenInstanceError` is a subclass
        setattr(message, field_names(message)[0], None)


def test_every_dataclass_is_frozen_unless_it_is_never_sent():
    """Check that a new dataclass is frozen, or is listed in `_MUTABLE` with a reason."""
    assert set(mutable_dataclasses(Path(pytorchrl.__file__).parent)) == set(_MUTABLE)


@pytest.mark.parametrize("error", _ERRORS, ids=lambda error: error.__name__)
def test_errors_pickle_with_their_message(error):
    again = pickle.loads(pickle.dumps(error("text", 3)))
    assert type(again) is error
    assert again.args == ("text", 3)


def parents_in(tree):
    """Return class -> names of its bases, as an error's line and place in the drawn tree of errors state them."""
    found, path = {}, []
    for line in tree.splitlines():
        if found_line := re.fullmatch(r"    ([│├└ ]*)(\w+)(?: \((\w+)\))?(?:  +.*)?", line):
            drawn, name, builtin = found_line.groups()
            del path[len(drawn) // 2:]
            found[name] = [*path[-1:], *filter(None, [builtin])] or ["Exception"]
            path.append(name)
    return found


def test_the_drawn_tree_of_errors_states_every_class_and_its_bases():
    assert len(_ERRORS) > 35
    assert parents_in(errors.__doc__) == {
        error.__name__: [base.__name__ for base in error.__bases__] for error in _ERRORS}


def test_every_error_is_in_the_module_of_errors():
    homes = {f"{path.stem} {node.name}" for path in sorted(Path(pytorchrl.__file__).parent.rglob("*.py"))
             for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
             and any(ast.unparse(base).endswith(("Error", "Exception", "Fault")) for base in node.bases)}
    assert {f"errors {error.__name__}" for error in _ERRORS} <= homes
    assert {home for home in homes if not home.startswith("errors ")} == _CAUGHT


@pytest.mark.parametrize("choice", [*Communication, *Execution])
def test_choices_are_strings_and_unpickle_to_themselves(choice):
    assert pickle.loads(pickle.dumps(choice)) is choice
    assert str(choice) == choice.value == choice
    assert type(choice)(choice.value) is choice


def test_choices_compare_with_plain_text():
    assert ASYNC == "asynchronous"
    assert CENTRAL == "Central"
    assert CENTRAL != "central"
