"""Check preemption in synchronous rounds: which workers are stopped, what becomes of their steps, and what metrics
report."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest

from pytorchrl import A2C, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv

STEP_S, SLOW_S, NUM_STEPS, NUM_ENVS = 0.1, 1.0, 20, 2
COSTS = {"start": 0, "message": 0, "step": STEP_S, "grad": 0, "update": 0}
SETTINGS = {"num_col_workers": 4, "col_fraction_workers": 0.75, "fraction_samples": 0.25}
THIRD_IS_SLOW = {"costs": {**COSTS, "step@*/CWorker 3": SLOW_S}}


@pytest.fixture
def make(check_ledger):
    """Return a function that runs a simulated scheme for a number of updates, with one update per round, and stops it.

    The function returns (metrics, final ledger, virtual seconds).
    """
    def make_(updates, env_fn=CountingEnv, storage=GAEBuffer, name=None, **settings):
        envs = VecEnv.create_factory(env_fn, None, NUM_ENVS)
        agent = (A2C.create_factory(),
                 OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,)),
                 storage.create_factory(NUM_STEPS), envs)
        scheme = (getattr(Scheme, name) if name else Scheme)(
            *agent, **{"runtime": "simulated", "seed": 1, "costs": COSTS} | settings)
        try:
            while scheme.version < updates:
                scheme.step()
                check_ledger(scheme)
            metrics, seconds = scheme.metrics(), scheme.runtime.now()
        finally:
            final = scheme.stop()
        assert final["in_flight"] == final["queued"] == 0
        assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())
        return metrics, final, seconds
    return make_


@pytest.mark.parametrize("slow", [THIRD_IS_SLOW, {"faults": f"delay col.3 {SLOW_S - STEP_S}s"}],
                         ids=["costs", "delays"])
def test_only_a_slow_worker_is_preempted_in_each_round(make, slow):
    """Check that the slow worker is preempted in each round, after the 5 steps that it must take.

    Each of the other three workers takes 20 steps in 2 s; by then, the slow worker has taken 2 steps.
    """
    metrics, final, seconds = make(6, **SETTINGS, **slow)
    assert metrics["preempted_by_worker"] == {"GWorker 0/CWorker 3": 6}
    assert metrics["rollouts_preempted"] == 6
    assert metrics["rollouts"] == 24
    assert metrics["preempted_steps_share"] == pytest.approx(5 / (3 * 20 + 5))
    assert final["consumed_unique"] == 6 * (3 * 20 + 5) * NUM_ENVS
    assert final["dropped"] == dict.fromkeys(final["dropped"], 0)
    assert seconds == pytest.approx(6 * 5 * SLOW_S)


@pytest.mark.parametrize(("fraction", "num_enough"), [(0.25, 1), (0.3, 2), (0.5, 2), (0.6, 3), (0.75, 3), (0.76, 4)])
def test_the_share_of_workers_that_ends_a_round_is_rounded_up(make, fraction, num_enough):
    """Check that the number of workers that must finish before a round ends is rounded up.

    Each worker is half as fast as the previous worker, so the workers finish one after another.
    """
    costs = {**COSTS, **{f"step@*/CWorker {1 + number}": STEP_S * 2**number for number in range(4)}}
    metrics, _, seconds = make(3, num_col_workers=4, col_fraction_workers=fraction, fraction_samples=0.05, costs=costs)
    assert metrics["preempted_by_worker"] == {f"GWorker 0/CWorker {number}": 3 for number in range(num_enough + 1, 5)}
    # Preempted workers finish their current step. A step takes 8 times as long on the slowest worker as on the fastest.
    assert seconds == pytest.approx(3 * NUM_STEPS * STEP_S * 2**(num_enough - 1), abs=3 * 8 * STEP_S + 1e-9)


def test_floating_point_error_does_not_round_the_share_up(make):
    """Check that a share of 3 x 0.2 of five workers means three workers, although 5 x (3 x 0.2) is slightly more than 3
    in floating point. The other two workers are slow, and are preempted."""
    fraction = 3 * 0.2
    assert math.ceil(5 * fraction) == 4
    costs = {**COSTS, "step@*/CWorker 4": SLOW_S, "step@*/CWorker 5": SLOW_S}
    metrics, *_ = make(3, num_col_workers=5, col_fraction_workers=fraction, costs=costs)
    assert metrics["preempted_by_worker"] == {"GWorker 0/CWorker 4": 3, "GWorker 0/CWorker 5": 3}


def test_the_replacement_of_a_slow_worker_is_also_preempted(make):
    """Check preemption if the slow worker is lost in the third round.

    The replacement starts the rollout of this round again. Each round lasts as long as five steps of the
    slow worker.
    """
    metrics, _, seconds = make(6, **SETTINGS, **THIRD_IS_SLOW, faults="kill col.3 @ step 12")
    assert metrics["workers_restarted"] == 1
    assert metrics["preempted_by_worker"] == {"GWorker 0/CWorker 3": 6}
    assert seconds < 8 * 5 * SLOW_S


def test_all_workers_are_awaited_without_preemption(make):
    metrics, _, seconds = make(3, num_col_workers=4, **THIRD_IS_SLOW)
    assert metrics["preempted_by_worker"] == {}
    assert metrics["preempted_steps_share"] == 0.0
    assert metrics["episode_length_preempted"] is None
    assert metrics["episode_length_full"] == 10.0
    assert seconds == pytest.approx(3 * 20 * SLOW_S)


def test_workers_of_several_gradient_workers_are_counted_separately(make):
    costs = {**COSTS, "step@GWorker 1/CWorker 2": SLOW_S, "step@GWorker 2/CWorker 4": SLOW_S}
    metrics, *_ = make(5, **SETTINGS, num_grad_workers=2, costs=costs)
    assert metrics["preempted_by_worker"] == {"GWorker 1/CWorker 2": 5, "GWorker 2/CWorker 4": 5}


def test_a_gradient_worker_that_collects_is_counted_as_worker_0(make):
    metrics, *_ = make(5, name="ddppo", num_grad_workers=3, costs={**COSTS, "step@GWorker 3/*": SLOW_S})
    assert metrics["preempted_by_worker"] == {"GWorker 3/CWorker 0": 5}
    assert metrics["preempted_steps_share"] == pytest.approx(5 / (2 * 20 + 5))


def test_counts_of_a_replaced_gradient_worker_are_kept(make):
    metrics, *_ = make(8, **SETTINGS, num_grad_workers=2, **THIRD_IS_SLOW, faults="kill grad.2 @ grad 4")
    assert metrics["workers_restarted"] == 1
    # one round was repeated after the other gradient worker was lost
    assert metrics["preempted_by_worker"]["GWorker 1/CWorker 3"] == 9
    assert metrics["preempted_by_worker"]["GWorker 2/CWorker 3"] == 8


class ShortWhereSlow:
    """A function that builds environments with episodes of 4 or 10 steps.

    The first environment only provides the spaces. The next `NUM_ENVS` environments have episodes of 4 steps, and all
    others have episodes of 10 steps.
    """

    def __init__(self):
        self._number = itertools.count()

    def __call__(self):
        return CountingEnv(episode_length=4 if 1 <= next(self._number) <= NUM_ENVS else 10)


def test_metrics_show_different_episodes_of_slow_workers(make):
    costs = {**THIRD_IS_SLOW["costs"], "start": 1.0, "start@*/CWorker 3": 0.0}
    metrics, *_ = make(8, ShortWhereSlow(), **SETTINGS, costs=costs)
    assert metrics["preempted_by_worker"] == {"GWorker 0/CWorker 3": 8}
    assert metrics["episode_length_preempted"] == 4.0
    assert metrics["episode_length_full"] == 10.0


def test_no_step_is_lost_with_random_delays(make, recorder):
    """Check that, with random delays, every step of each environment is used exactly once for learning."""
    metrics, final, _ = make(12, recorder.env_fn, recorder.storage, **SETTINGS, faults="delay col.* 1s p=0.05")
    preempted = metrics["preempted_by_worker"]
    assert len(preempted) > 1
    assert sum(preempted.values()) == metrics["rollouts_preempted"] <= metrics["rollouts"] / 4
    assert final["consumed_unique"] == len(recorder.inserted)
    made, used = defaultdict(list), defaultdict(list)
    for steps, found in ((made, recorder.made), (used, recorder.inserted)):
        for seed, *step in found:
            steps[seed].append(step)
    assert len(used) == SETTINGS["num_col_workers"] * NUM_ENVS
    for seed, steps in used.items():
        assert sorted(steps) == made[seed][:len(steps)]


def test_the_share_counts_remaining_workers(make):
    """Check when rounds end if one of three workers is lost and not replaced.

    Before the loss, a round ends when two of the three workers have finished. After the loss, it ends when one of the
    two remaining workers has finished.
    """
    settings = {"num_col_workers": 3, "col_fraction_workers": 0.5, "on_worker_failure": "ignore", **THIRD_IS_SLOW}
    metrics, *_ = make(6, **settings, faults="kill col.1 @ step 30")
    assert metrics["preempted_by_worker"]["GWorker 0/CWorker 3"] == 6
