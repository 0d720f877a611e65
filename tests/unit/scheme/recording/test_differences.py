"""Check that the first difference between a replayed run and its record is reported."""

from __future__ import annotations


import pytest

from pytorchrl import PPO, VecEnv
from pytorchrl.envs.testing import FaultyEnv
from pytorchrl.errors import ReplayError
from tests.unit.scheme.recording.conftest import ALL_ASYNC, ASYNC_COLLECTION


def test_a_different_event_is_reported(runs):
    runs.record(runtime="threads", **ALL_ASYNC)

    def change(part):  # swap the two workers in answers to the driver
        answers = [event for event in part[2] if part[0] == "UWorker" and event[0] == "answer"]
        for event in answers:
            event[1] = 1 - event[1]
        return bool(answers)
    runs.alter(change)
    with pytest.raises(ReplayError, match=r"(differs from its record at event \d+ of UWorker: the record has "
                                          r"answer|follow its record)"):
        runs.replay(**ALL_ASYNC)


def test_a_different_order_of_parameter_access_is_reported(runs):
    runs.record(runtime="threads", **ASYNC_COLLECTION)

    def change(part):
        if part[0] == "GWorker 0" and sum(part[3]) > 0 and part[2]:
            part[3][part[3].index(max(part[3]))] += 1000
            return True
        return False
    runs.alter(change)
    with pytest.raises(ReplayError, match=r"(?s)event .* of GWorker 0: the record has|waits for its turn to write the "
                                          r"parameters of GWorker 0"):
        runs.replay(**ASYNC_COLLECTION)


def test_a_nondeterministic_environment_is_reported(runs):
    class Drawn(FaultyEnv):
        # Offset of each new environment: 0 in the probes and the recorded run, 1 in the replay
        offsets = iter([0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1])

        def __init__(self):
            super().__init__("step", at=10**6)
            self._offset = next(self.offsets)
    settings = {"envs": VecEnv.create_factory(Drawn), **ASYNC_COLLECTION}
    runs.record(runtime="threads", **settings)
    Drawn.offsets = iter([1] * 100)
    with pytest.raises(ReplayError, match="at event 4 of GWorker 0: the record has answer"):
        runs.replay(**settings)


def test_different_final_parameters_are_reported(runs):
    runs.record(runtime="threads", **ALL_ASYNC)
    runs.rewrite(lambda lines: lines[-1].update(checksum=1) or True)
    with pytest.raises(ReplayError, match="ends with other parameters"):
        runs.replay(**ALL_ASYNC)


def test_a_missing_worker_is_reported(runs):
    runs.record(runtime="threads", **ASYNC_COLLECTION)
    runs.alter(lambda part: part[0] == "GWorker 0" and (part[2].insert(0, ["replaced", 99]) or True))
    with pytest.raises(ReplayError, match="the record has replaced 99"):
        runs.replay(**ASYNC_COLLECTION)


def test_different_numbers_in_an_update_are_reported(runs, monkeypatch):
    runs.record(runtime="threads", **ASYNC_COLLECTION)
    right = PPO.compute_gradients

    def compute(self, batch):
        grads, info = right(self, batch)
        return [grad * (1 + 1e-6) for grad in grads], info
    monkeypatch.setattr(PPO, "compute_gradients", compute)
    with pytest.raises(ReplayError, match="at event 1 of UWorker: the record has update 1"):
        runs.replay(**ASYNC_COLLECTION)
