"""Check that normalizers learn from the data of asynchronous gradients once, and only if a gradient is applied."""

from __future__ import annotations

import pytest

from pytorchrl import A2C, ASYNC, PPO, OnPolicyActor, VecEnv
from pytorchrl.envs.testing import CountingEnv


def test_normalizers_ignore_dropped_train_batches(make_scheme):
    """Check that normalizers do not learn from dropped data.

    If two workers answer together and only lag 0 is allowed, the second gradient is dropped, with the moments of its
    data.
    """
    def seen(**settings):
        scheme = make_scheme(algo=A2C.create_factory(), runtime="simulated", num_grad_workers=2,
                             grad_communication=ASYNC, schedule_seed=3, size=4, updates_per_step=30, **settings)
        worker = scheme.start().local_worker.local_worker
        merged, merge = [], worker.merge_moments
        worker.merge_moments = lambda moments: (merged.extend(moments), merge(moments))
        scheme.step()
        return len(merged), scheme.metrics()["grads_dropped"]
    envs = VecEnv.create_factory(CountingEnv, None, 2)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, normalize_obs=True)
    assert seen(actor=actor, envs=envs) == (30, 0)
    merged, dropped = seen(actor=actor, envs=envs, max_grad_lag=0, lag_policy="drop")
    assert dropped > 0
    assert merged == 30


NOTHING_LATE = {"max_grad_lag": 0, "lag_policy": "drop"}


@pytest.mark.every(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("settings", "options"), [
    ({"max_grad_lag": 1, "lag_policy": "drop", "num_grad_workers": 3}, {}), (NOTHING_LATE, {}),
    (NOTHING_LATE, {"target_kl": 1e-6}), ({"faults": "kill grad.2 @ grad 6; kill grad.1 @ grad 11"}, {})],
    ids=["lag 1", "lag 0", "early stop", "lost"])
def test_normalizers_use_a_train_batch_once_with_its_last_gradient(make_scheme, monkeypatch, settings, options, seed):
    """Check that normalizers learn from a train batch once, when its last gradient is applied.

    Earlier gradients may have been dropped, and a worker may be lost before the last gradient.
    """
    envs = VecEnv.create_factory(CountingEnv, None, 2)
    scheme = make_scheme(
        algo=PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=1e-2, **options), envs=envs, size=4,
        actor=OnPolicyActor.create_factory(envs.observation_space, envs.action_space, normalize_obs=True),
        runtime="simulated", schedule_seed=seed, costs={"grad": ("exponential", 0.1)}, grad_communication=ASYNC,
        **{"num_grad_workers": 2} | settings)
    statistics = scheme.start(10**6).statistics
    learner = scheme.update_worker.local_worker.local_worker
    apply, merge, ends, merged = statistics.apply, learner.merge_moments, [], []

    def watch_apply(parts, version, info):
        ends.extend(part for part in parts if part.last or part.info.get("skip_remaining"))
        apply(parts, version, info)

    def watch_merge(moments):
        moments = list(moments)
        merged.extend(moments)
        merge(moments)
    monkeypatch.setattr(statistics, "apply", watch_apply)
    monkeypatch.setattr(learner, "merge_moments", watch_merge)
    for _ in range(60):
        scheme.step()
    assert len(merged) == len(ends) > 5
    assert (scheme.metrics()["workers_restarted"] == 2) == ("faults" in settings)
    assert (scheme.metrics()["grads_dropped"] > 15) == ("lag_policy" in settings)
