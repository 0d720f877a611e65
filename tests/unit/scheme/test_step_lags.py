"""Test that the lags of single steps add up exactly, by cause, to the lags that gradients see."""

from __future__ import annotations

import collections

import pytest

from pytorchrl import ASYNC, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.agent.actors import DecoderActor
from pytorchrl.agent.algorithms import GRPO
from pytorchrl.agent.env.tokens import TokenEnv
from pytorchrl.agent.storages import GroupBuffer
from pytorchrl.envs.tasks import Copy

EPOCHS = 2
LAGGING = {"num_col_workers": 2, "col_communication": ASYNC, "queue_size": 2, "costs": {"grad": 0.01, "step": 0.001}}


def scheme_of(kind, mode="finish", **settings):
    if kind == "tokens":
        envs = TokenEnv.create_factory(Copy, {"longest": 5}, 12, group_size=4, waits=False)
        agent = (
            GRPO.create_factory(num_epochs=EPOCHS, num_mini_batch=2, correction="a3po", on_new_weights=mode),
            DecoderActor.create_factory(envs.observation_space, envs.action_space, context=12, width=8),
            GroupBuffer.create_factory(2, group_size=4))
    else:
        envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
        agent = (
            PPO.create_factory(num_epochs=EPOCHS, num_mini_batch=2, correction="a3po"),
            OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
            GAEBuffer.create_factory(8))
    return Scheme(*agent, envs, seed=1, runtime="simulated", **settings)


CASES = {
    "synchronous": {}, "lagging": LAGGING, "waiting": {**LAGGING, "max_policy_lag": 4, "on_policy_lag": "wait"},
    "dropping": {**LAGGING, "max_policy_lag": 4},
}
CENTRAL = {**LAGGING, "inference": "central"}  # rollouts of control tasks do not contain the version of each step


@pytest.mark.parametrize(("kind", "settings"), [
    *(pytest.param(kind, settings, id=f"{kind}, {name}") for kind in ("tokens", "control")
      for name, settings in CASES.items()), pytest.param("tokens", CENTRAL, id="tokens, central inference")])
def test_the_parts_add_up_to_the_lags_that_gradients_see(kind, settings):
    scheme = scheme_of(kind, **settings)
    algorithm, seen = scheme.start().local_worker.algo, collections.Counter()
    compute = algorithm.compute_gradients

    def recording(batch):
        lag = algorithm.prepare_batch(batch).other["lag"]
        seen.update((lag if batch.valid is None else lag[batch.valid]).tolist())
        return compute(batch)

    algorithm.compute_gradients = recording
    while scheme.version < 60 or scheme.version % (2 * EPOCHS):
        scheme.step()
    lags = scheme.metrics()["step_lag"]
    ledger = scheme.ledger()
    found = scheme.update_worker.statistics._lags._steps
    scheme.stop()
    total = {cause: sum(lag * count for lag, count in histogram.items()) for cause, histogram in found.items()}
    count = {cause: histogram.total() for cause, histogram in found.items()}
    assert count["generation"] == count["queue"] == count["first_use"] == ledger["consumed_unique"]
    assert count["passes"] == seen.total() == EPOCHS * count["first_use"]
    assert total["generation"] + total["queue"] == total["first_use"]
    assert sum(lag * number for lag, number in seen.items()) == EPOCHS * total["first_use"] + total["passes"]
    assert lags["generation"]["mean"] + lags["queue"]["mean"] == pytest.approx(lags["first_use"]["mean"])
    assert lags["passes"]["max"] == 2 * EPOCHS - 1
    assert settings == {} or lags["first_use"]["mean"] > 1


def test_the_lags_of_a_sequence_grow_while_it_grows():
    """Without a queue and without other workers, the lag of tokens is that of their generation."""
    means = []
    for mode in ("finish", "keep"):
        scheme = scheme_of("tokens", mode)
        while scheme.version < 40:
            scheme.step()
        lags = scheme.metrics()["step_lag"]
        scheme.stop()
        assert lags["queue"]["max"] == 0
        means.append(lags["generation"]["mean"])
    assert means[0] > means[1] > 0  # "finish" draws all tokens with the weights of the start


def test_a_resumed_run_continues_the_counts():
    first = scheme_of("tokens")
    for _ in range(12):
        first.step()
    checkpoint = first.checkpoint(30)
    second = scheme_of("tokens")
    second.resume(checkpoint)
    for scheme in (first, second):
        for _ in range(8):
            scheme.step()
    assert first.metrics()["step_lag"] == second.metrics()["step_lag"]
    first.stop()
    second.stop()
