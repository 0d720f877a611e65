"""Call the methods of a scheme in random order, with random settings and faults; check the ledger after each call."""

from __future__ import annotations

import random

import pytest

from pytorchrl import ASYNC, Scheme
from pytorchrl.agent.synthetic import SyntheticEnvs, synthetic_agent
from pytorchrl.errors import WorkerLostError
from tests.conftest import seeds
from tests.unit.scheme.resizing import CASES

FAULTS = ("kill col.* p=0.01", "delay col.* 2s p=0.03", "hang col.1 @ step 25",
          "kill col.1 @ step 20; kill col.2 @ step 22")
FAULTS_WITH_GRADIENT_WORKERS = ("kill grad.* p=0.05", "delay grad.* 1s p=0.05")
FAULTS_WITH_SHARDS = ("kill shard.* p=0.03", "delay shard.* 1s p=0.05")
SHARDS = {"col_communication": ASYNC, "grad_communication": ASYNC, "num_replay_workers": 2, "train_batch_size": 8}
SETTINGS = [*CASES.values(), SHARDS]
CALLS = {"step": 8, "sleep": 2, "drain": 1, "checkpoint": 1, "resize": 1}


@pytest.fixture
def made(monkeypatch):
    """Return a list that receives the number of env steps of each call of `SyntheticEnvs.step`."""
    made, step = [], SyntheticEnvs.step

    def stepping(envs, action):
        result = step(envs, action)
        made.append(len(result.reward))
        return result
    monkeypatch.setattr(SyntheticEnvs, "step", stepping)
    return made


@pytest.fixture
def make():
    """Return a function that makes simulated schemes; all of them are stopped after the test."""
    schemes = []

    def make_(seed, settings):
        agent = synthetic_agent(4, capacity=200 if "num_replay_workers" in settings else None)
        schemes.append(Scheme(*agent, seed=seed, schedule_seed=seed, runtime="simulated", **settings))
        return schemes[-1]
    yield make_
    for scheme in schemes:
        scheme.stop()


def random_settings(rng):
    """Return the settings of a random scheme with remote collection workers, and with faults in half of all cases."""
    settings = {"num_col_workers": rng.choice((2, 3)), **rng.choice(SETTINGS)}
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


@pytest.mark.parametrize("seed", seeds(40, 300))
def test_no_order_of_calls_stops_collection_or_loses_a_step(make, made, check_ledger, seed):
    """Check that each step remains in one place, that data keep arriving, and that a checkpoint can be resumed.

    Without faults, the ledger counts all steps that the environments have taken.
    """
    rng = random.Random(f"calls {seed}")
    settings = random_settings(rng)
    scheme, saved = make(seed, settings), None
    scheme.start()
    try:
        saved = call_randomly(scheme, rng, rng.randint(1, 14), check_ledger)
    except WorkerLostError:
        assert settings["on_worker_failure"] == "ignore"  # no worker is left
    final = scheme.stop()
    assert check_ledger(scheme) == final
    assert final["in_flight"] == final["queued"] == 0
    if "faults" not in settings:
        assert sum(made) == final["collected"]
    if saved is not None:
        again = make(seed, {name: value for name, value in settings.items() if name != "faults"})
        again.resume(saved)
        again.start()
        call_randomly(again, rng, rng.randint(1, 6), check_ledger)
        again.stop()
        check_ledger(again)
