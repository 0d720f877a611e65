"""Algorithms whose data may be a few updates old, in schemes where it is."""

from __future__ import annotations

import pytest
import torch

from pytorchrl import APPO, ASYNC, IMPALA, PPO, GAEBuffer, VTraceBuffer
from pytorchrl.errors import ConfigError

SLOW = {"target_network": True, "kl_coef": 0.4}


def test_impala_runs_in_all_patterns(make_scheme, pattern):
    scheme = make_scheme(algo=IMPALA.create_factory(), storage=VTraceBuffer, **pattern)
    start = scheme.acting_state()["all"]
    for _ in range(4):
        info = scheme.step()
        assert info["loss"] == info["loss"]
    assert not torch.equal(scheme.acting_state()["all"], start)
    ledger = scheme.stop()
    placed = ledger["consumed_unique"] + sum(ledger["dropped"].values())
    assert ledger["collected"] == placed > 0


@pytest.mark.parametrize(("algorithm", "storage"), [(IMPALA, GAEBuffer), (PPO, VTraceBuffer)])
def test_storage_that_does_not_fit_is_refused_before_anything_starts(make_scheme, algorithm, storage):
    with pytest.raises(ConfigError, match=f"{storage.__name__} does not fit {algorithm.__name__}"):
        make_scheme(algo=algorithm.create_factory(), storage=storage)


@pytest.mark.parametrize("settings", [{}, {"grad_communication": ASYNC}])
@pytest.mark.parametrize("options", [{"target_network": True}, {"kl_coef": 0.1}])
def test_what_gradient_workers_would_not_learn_of_is_refused(make_scheme, options, settings):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*distribute_gradients"):
        make_scheme(algo=APPO.create_factory(**options), storage=VTraceBuffer, num_grad_workers=2, **settings)


def test_ranks_that_apply_updates_themselves_agree_on_the_slow_policy_and_the_weight_of_kl(make_scheme):
    scheme = make_scheme(
        algo=APPO.create_factory(num_epochs=1, num_mini_batch=3, lr=1e-2, **SLOW), storage=VTraceBuffer,
        num_grad_workers=2, distribute_gradients=True)
    for _ in range(5):
        info = scheme.step()
    states = [handle.native.worker.algo.gradient_state() for handle in scheme.update_worker.remote_workers]
    assert states[0]["kl_coef"] == states[1]["kl_coef"] == info["kl_coef"] != 0.4
    for name, tensor in states[0]["slow"].items():
        assert torch.equal(tensor, states[1]["slow"][name])
    slow = torch.cat([tensor.flatten() for tensor in states[0]["slow"].values()])
    assert not torch.equal(slow, states[0]["acting"]["all"])  # 5 is odd


def test_central_updates_move_the_slow_policy(make_scheme):
    scheme = make_scheme(algo=APPO.create_factory(num_epochs=1, num_mini_batch=1, lr=1e-2, **SLOW), storage=VTraceBuffer)
    start = scheme.acting_state()["all"]
    for number in range(1, 5):
        scheme.step()
        state = scheme.update_worker.local_worker.algo.gradient_state()
        slow = torch.cat([tensor.flatten() for tensor in state["slow"].values()])
        assert torch.equal(slow, state["acting"]["all"]) is (number % 2 == 0)
    assert not torch.equal(slow, start)
