"""Check algorithms with a policy, critics and memory in the worker tree: patterns, sequences and stored states."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import ASYNC, SAC, TD3, OffPolicyActor, Scheme, SequenceBuffer, VecEnv
from pytorchrl.agent.data import map_tensors
from pytorchrl.agent.storages import UniformSequenceBuffer
from pytorchrl.envs.testing import CountingEnv

LENGTH, BURN_IN = 5, 3
SHARDS = {"num_col_workers": 3, "num_replay_workers": 2, "col_communication": ASYNC, "grad_communication": ASYNC}


class Continuous(CountingEnv):
    """A `CountingEnv` with continuous actions, which it ignores."""

    def __init__(self, **options):
        super().__init__(**options)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def step(self, action):
        return super().step(int(action[0] > 0))


def watched(cls):
    class Watched(cls):
        """An algorithm that stores its batches for the tests; all workers run in the process of the tests."""

        seen = []  # noqa: RUF012 - one list for all workers

        def compute_gradients(self, batch):
            self.seen.append((map_tensors(batch, torch.Tensor.cpu), self))
            return super().compute_gradients(batch)
    return Watched


def scheme_of(cls, storage=UniformSequenceBuffer, algo=None, **settings):
    envs = VecEnv.create_factory(Continuous, {"episode_length": 14, "truncate": True}, 2)
    is_deterministic = issubclass(cls, TD3)
    return Scheme(
        cls.create_factory(**{"start_steps": 60, "mini_batch_size": 8, "update_every": 16, "num_updates": 1,
                              **(algo or {})}),
        OffPolicyActor.create_factory(
            envs.observation_space, envs.action_space, hidden_sizes=(4,), recurrent_net="gru", recurrent_size=5,
            policy="deterministic" if is_deterministic else "stochastic"),
        storage.create_factory(2000, rollout_size=4, length=LENGTH, burn_in=BURN_IN, period=2, n_step=2), envs,
        **{"seed": 1, "runtime": "simulated", **settings})


@pytest.mark.timeout(120)
def test_every_pattern_trains_a_memory(pattern, stopped, check_ledger):
    scheme = stopped(scheme_of(SAC, runtime="threads", **pattern))
    losses = []
    while scheme.version < 6:
        losses.append(scheme.step()["loss"])
    ledger = check_ledger(scheme)
    assert ledger["resident"] > 0
    assert np.isfinite([loss for loss in losses if loss is not None]).all()


PLACES = {"in-learner": {}, "in-rounds": {"num_col_workers": 3}, "central-inference": {
    "num_col_workers": 2, "col_communication": ASYNC, "inference": "central"}, "shards": SHARDS}


@pytest.mark.parametrize("settings", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("cls", "storage"), [(SAC, UniformSequenceBuffer), (TD3, SequenceBuffer)])
def test_sequences_are_whole_and_begin_with_the_memory_of_their_episode(cls, storage, settings, stopped, check_ledger):
    """Check that stored states equal those of a new unroll from the start of the episode.

    The learning rate is 0, so the parameters never change. Observations show the step of the episode.
    """
    kind = watched(cls)
    scheme = stopped(scheme_of(kind, storage, {"lr_pi": 0.0, "lr_q": 0.0}, **settings))
    while scheme.version < 5:
        scheme.step()
    check_ledger(scheme)
    known = {}  # (seed, episode) -> step -> observation, from all sequences
    for batch, _ in kind.seen:
        for row in batch.obs["obs"].flatten(0, 1).numpy():
            known.setdefault((row[0], row[1]), {})[int(row[2])] = row
    num_checked = 0
    for batch, algorithm in kind.seen:
        assert batch.action.shape == (*batch.ret.shape, 2)
        for b in range(len(batch.ids)):
            done = batch.done[:, b].nonzero().flatten().tolist()
            first = done[0] if done else 0
            rows = batch.obs["obs"][first:batch.burn_in + int(batch.valid[:, b].sum()) + 1, b].numpy()
            assert len({(row[0], row[1]) for row in rows}) == 1  # the environment and the episode
            steps = rows[:, 2].astype(int).tolist()
            assert steps == list(range(steps[0], steps[0] + len(steps)))
            whole = known[rows[0, 0], rows[0, 1]]
            if done:
                assert steps[0] == 0
                assert not batch.rhs["pi"][b].any()
            elif all(step in whole for step in range(steps[0])):
                obs = torch.as_tensor(np.stack([whole[step] for step in range(steps[0])]))[:, None]
                with torch.no_grad():
                    _, state = algorithm.actor.policy.trunk.forward(
                        {"obs": obs}, torch.zeros(1, 5), torch.arange(len(obs))[:, None] == 0)
                torch.testing.assert_close(batch.rhs["pi"][b], state[0], rtol=0.0, atol=1e-6)
                num_checked += 1
    assert num_checked >= 5
