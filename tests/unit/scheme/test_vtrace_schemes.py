"""Check algorithms that accept data that are a few updates old, in schemes that produce such data."""

from __future__ import annotations

import pytest
import torch

from pytorchrl import APPO, ASYNC, IMPALA, PPO, SYNC, GAEBuffer, VTraceBuffer
from pytorchrl.errors import ConfigError

SLOW = {"target_network": True, "kl_coef": 0.4}


def test_impala_runs_in_all_patterns(make_scheme, some_pattern):
    scheme = make_scheme(algo=IMPALA.create_factory(), storage=VTraceBuffer, **some_pattern)
    start = scheme.acting_state()["all"]
    for _ in range(4):
        info = scheme.step()
        assert info["loss"] == info["loss"]
    assert not torch.equal(scheme.acting_state()["all"], start)
    ledger = scheme.stop()
    placed = ledger["consumed_unique"] + sum(ledger["dropped"].values())
    assert ledger["collected"] == placed > 0


@pytest.mark.parametrize(("algorithm", "storage"), [(IMPALA, GAEBuffer), (PPO, VTraceBuffer)])
def test_an_incompatible_storage_is_refused_before_anything_starts(make_scheme, algorithm, storage):
    with pytest.raises(ConfigError, match=f"{algorithm.__name__} learns from .*, but {storage.__name__} provides"):
        make_scheme(algo=algorithm.create_factory(), storage=storage)


def slow_of(state):
    return torch.cat([tensor.flatten() for name, tensor in state["learning"].items() if name.startswith("slow.")])


@pytest.mark.parametrize("communication", [SYNC, ASYNC])
def test_gradient_workers_receive_slow_policy_and_kl_coefficient(make_scheme, communication):
    scheme = make_scheme(
        algo=APPO.create_factory(num_epochs=1, num_mini_batch=2, lr=1e-2, **SLOW), storage=VTraceBuffer,
        num_grad_workers=2, grad_communication=communication, runtime="simulated")
    seen = {}
    for _ in range(9):
        scheme.step()
        local = scheme.update_worker.local_worker
        seen[local.actor_version] = (slow_of(local.algo.gradient_state()), local.algo.kl_coef)
        for handle in scheme.update_worker.remote_workers:
            worker = handle.native.worker
            if worker.actor_version > 0:
                slow, weight = seen[worker.actor_version]
                assert torch.equal(slow_of(worker.algo.gradient_state()), slow)
                assert worker.algo.kl_coef == weight
    assert worker.actor_version > 3
    assert worker.algo.kl_coef != 0.4


def test_ranks_agree_on_the_slow_policy_and_the_kl_coefficient(make_scheme):
    scheme = make_scheme(
        algo=APPO.create_factory(num_epochs=1, num_mini_batch=3, lr=1e-2, **SLOW), storage=VTraceBuffer,
        num_grad_workers=2, distribute_gradients=True)
    for _ in range(5):
        info = scheme.step()
    states = [handle.native.worker.algo.gradient_state() for handle in scheme.update_worker.remote_workers]
    assert states[0]["learning"]["kl_coef"] == states[1]["learning"]["kl_coef"] == info["kl_coef"] != 0.4
    assert torch.equal(slow_of(states[0]), slow_of(states[1]))
    # The version is odd, and the slow policy is copied at even versions only
    assert not torch.equal(slow_of(states[0]), states[0]["acting"]["all"])


def test_central_updates_change_the_slow_policy(make_scheme):
    scheme = make_scheme(algo=APPO.create_factory(num_epochs=1, num_mini_batch=1, lr=1e-2, **SLOW),
                         storage=VTraceBuffer)
    start = scheme.acting_state()["all"]
    for number in range(1, 5):
        scheme.step()
        state = scheme.update_worker.local_worker.algo.gradient_state()
        assert torch.equal(slow_of(state), state["acting"]["all"]) is (number % 2 == 0)
    assert not torch.equal(slow_of(state), start)
