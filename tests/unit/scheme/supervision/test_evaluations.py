"""Check evaluations that run in a separate worker during training."""

from __future__ import annotations

import threading

from pytorchrl import VecEnv
from pytorchrl.envs.testing import CountingEnv


def test_evaluation_runs_during_training(make_scheme):
    may_step = threading.Event()

    class Waiting(CountingEnv):
        def step(self, action):
            assert may_step.wait(60)
            return super().step(action)
    envs = VecEnv.create_factory(CountingEnv, {"episode_length": 5}, 2)
    scheme = make_scheme(envs=envs, test_envs=VecEnv.create_factory(Waiting, {"episode_length": 6}, 2))
    scheme.step()
    assert scheme.poll_evaluation() is None
    scheme.start_evaluation(5)
    scheme.step()  # does not wait for the evaluation, which cannot continue yet
    assert scheme.poll_evaluation() is None
    may_step.set()
    evaluation = scheme.wait_evaluation(20.0)
    assert evaluation.version == 1
    assert sorted(evaluation.lengths) == [6] * 5
    assert len(evaluation.returns) == 5
    assert scheme.poll_evaluation() is None
    assert scheme.ledger()["collected"] == scheme.ledger()["consumed_unique"]  # steps of evaluations are not counted
