"""Check which steps the ledger does not count as collected after a collection worker is lost."""

from __future__ import annotations

import pytest

from pytorchrl import ASYNC
from pytorchrl.envs.testing import CountingEnv

NUM_ENVS, SIZE = 2, 8


@pytest.mark.every(2)
@pytest.mark.parametrize("settings", [{}, {"col_communication": ASYNC}, {"num_grad_workers": 2}])
@pytest.mark.parametrize("step", [1, SIZE + 1, 2 * SIZE + 5])
def test_only_the_unfinished_rollout_of_a_lost_worker_is_not_collected(make_scheme, check_ledger, settings, step):
    """Check the difference between the steps that environments took and the steps that the ledger counts.

    The worker is lost after `step` steps, before it delivers the rollout that contains the last of these steps.
    """
    taken = []

    class Counted(CountingEnv):
        def step(self, action):
            taken.append(action)
            return super().step(action)
    scheme = make_scheme(Counted, num_envs=NUM_ENVS, size=SIZE, num_col_workers=2, runtime="simulated",
                         faults=f"kill col.2 @ step {step}", **settings)
    while scheme.metrics()["workers_restarted"] < 1 + (settings.get("num_grad_workers") == 2) or scheme.version < 24:
        scheme.step()
        check_ledger(scheme)
    restarts, final = scheme.metrics()["workers_restarted"], scheme.stop()
    assert len(taken) - final["collected"] == restarts * NUM_ENVS * (step % SIZE)
    assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())
