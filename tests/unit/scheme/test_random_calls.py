"""Call the methods of a scheme in random order, with random settings and faults; check the ledger after each call."""

from __future__ import annotations

import random

import pytest

from pytorchrl.errors import WorkerLostError
from tests.conftest import seeds
from tests.unit.scheme.resizing import CASES, account_fixture, make_fixture  # noqa: F401 - fixtures

FAULTS = ("kill col.* p=0.01", "delay col.* 2s p=0.03", "hang col.1 @ step 25",
          "kill col.1 @ step 20; kill col.2 @ step 22")
FAULTS_WITH_GRADIENT_WORKERS = ("kill grad.* p=0.05", "delay grad.* 1s p=0.05")
FAULTS_WITH_SHARDS = ("kill shard.* p=0.03", "delay shard.* 1s p=0.05")
CALLS = {"step": 8, "sleep": 2, "drain": 1, "checkpoint": 1, "resize": 1}


def random_settings(rng):
    """Return the settings of a random scheme with remote collection workers, and with faults in half of all cases."""
    settings = {"num_col_workers": rng.choice((2, 3)), **rng.choice([*CASES.values()])}
    faults = [*FAULTS, *(FAULTS_WITH_GRADIENT_WORKERS if settings.get("num_grad_workers", 1) > 1 else ()),
              *(FAULTS_WITH_SHARDS if "num_replay_workers" in settings else ())]
    if rng.random() < 0.5:
        settings["faults"] = "; ".join(rng.sample(faults, rng.choice((1, 2))))
    costs = {name: ("exponential", 10 ** rng.uniform(-4, -0.5))
             for name in ("step", "message", "grad", "update", "add", "sample")}
    return {**settings, "on_worker_failure": rng.choice(("restart", "restart", "ignore")), "costs": costs,
            "worker_timeout_s": 3.0 if "faults" in settings else 60.0}


def call_randomly(scheme, rng, count, check_ledger):
    """Make `count` random calls, check the ledger after each of them, and return the last checkpoint, or None."""
    saved = None
    for name in rng.choices([*CALLS], [*CALLS.values()], k=count):
        if name == "step":
            scheme.step()
        elif name == "sleep":
            scheme.runtime.sleep(10 ** rng.uniform(-4, 0.7))
        elif name == "drain":
            ledger = scheme.drain()
            assert ledger["in_flight"] == ledger["queued"] == 0
        elif name == "checkpoint":
            saved = scheme.checkpoint()
        else:
            scheme.resize(num_col_workers=rng.choice((2, 3, 5)))
        check_ledger(scheme)
    return saved


@pytest.mark.parametrize("seed", seeds(10, 300))
def test_no_order_of_calls_stops_collection_or_loses_a_step(make, account, check_ledger, seed):
    """Check that each step remains in one place, that data keep arriving, and that a checkpoint can be resumed.

    Without faults, the ledger counts all steps that the environments have taken.
    """
    rng = random.Random(f"calls {seed}")
    settings = random_settings(rng)
    scheme, saved = make(seed=seed, schedule_seed=seed, **settings), None
    scheme.start()
    try:
        saved = call_randomly(scheme, rng, rng.randint(1, 14), check_ledger)
    except WorkerLostError:
        assert settings["on_worker_failure"] == "ignore"  # no worker is left
    final = scheme.stop()
    assert check_ledger(scheme) == final
    assert final["in_flight"] == final["queued"] == 0
    if "faults" not in settings:
        assert len(account.made) == final["collected"]
    if saved is not None:
        settings.pop("faults", None)
        again = make(seed=seed, schedule_seed=seed, **settings)
        again.resume(saved)
        again.start()
        call_randomly(again, rng, rng.randint(1, 6), check_ledger)
        again.stop()
        check_ledger(again)
