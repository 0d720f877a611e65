"""Check a gradient worker's own replay: how the ledger counts its steps, when learning starts, and what workers
receive."""

from __future__ import annotations

import pytest
import torch

from pytorchrl import ASYNC, DQN, SYNC, QActor, ReplayBuffer, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.supervision.evaluation import Evaluator
from pytorchrl.scheme.transport.messages import Weights


def make_updates(scheme, count):
    while scheme.version < count:
        scheme.step()


@pytest.mark.parametrize("runtime", ["threads", "simulated"])
def test_steps_are_resident_until_newer_ones_replace_them(make_replay_scheme, check_ledger, some_pattern, runtime):
    scheme = make_replay_scheme({"size": 4, "capacity": 10, "num_mini_batch": 2}, runtime=runtime, **some_pattern)
    make_updates(scheme, 30)
    ledger = check_ledger(scheme)
    places = scheme.settings["num_grad_workers"] if scheme.settings["grad_execution"] == "Parallel" else 1
    assert 0 < ledger["resident"] <= 10 * places
    assert ledger["evicted"] > 0
    assert ledger["consumed_unique"] == 0
    assert ledger["consumed"] > ledger["resident"]
    final = scheme.stop()
    assert final["in_flight"] == final["queued"] == 0
    assert final["collected"] == final["resident"] + final["evicted"] + sum(final["dropped"].values())


def test_there_is_no_update_before_learning_starts(make_replay_scheme):
    scheme = make_replay_scheme({"size": 4, "capacity": 100, "learning_starts": 21})
    scheme.step()
    ledger = scheme.ledger()
    assert ledger["collected"] == ledger["resident"] == 24
    assert scheme.env_steps == 24
    scheme.step()
    assert scheme.ledger()["collected"] == 28


def test_schedules_follow_the_steps_added_to_replay(make_replay_scheme):
    scheme = make_replay_scheme({"size": 4, "capacity": 10})
    scheme.start(100)
    algo, seen = scheme.update_worker.local_worker.algo, []
    algo.schedules = {"epsilon": None}
    algo.follow_schedules = lambda env_steps, target_steps: seen.append((env_steps, target_steps))
    for _ in range(5):
        scheme.step()
    assert seen == [(4 * number, 100) for number in range(5)]


def test_a_lost_gradient_worker_loses_its_replay(make_replay_scheme, check_ledger):
    """Check that the steps in the replay of the lost worker are dropped, while steps evicted earlier remain evicted."""
    scheme = make_replay_scheme({"size": 4, "capacity": 10}, num_grad_workers=2, grad_communication=ASYNC,
                                faults="kill grad.1 @ grad 9")
    make_updates(scheme, 60)
    assert scheme.metrics()["workers_restarted"] == 1
    ledger = check_ledger(scheme)
    assert ledger["dropped"]["worker_lost"] >= 10
    assert ledger["evicted"] > 20
    scheme.stop()
    check_ledger(scheme)


@pytest.mark.parametrize(("name", "value"), [
    ("num_passes", 2), ("minibatch_buffer_size", 3), ("ramp", True), ("buffer", "circular"), ("microbatch_size", 2)])
def test_rollout_options_are_refused_with_replay(make_replay_scheme, name, value):
    """Check that schemes with replay reject options for rollouts that are discarded after use.

    A rollout that is used in several passes, for example, would be inserted into replay repeatedly.
    """
    message = f"{name}={value} is for rollouts that are used and discarded, but SyntheticReplay stores them"
    with pytest.raises(ConfigError, match=message):
        make_replay_scheme({"capacity": 10}, col_communication=ASYNC, **{name: value})


@pytest.mark.parametrize("communication", [SYNC, ASYNC])
def test_gradient_workers_are_sent_target_networks(communication):
    """Check that gradient workers receive target networks, which only the update worker changes."""
    envs = VecEnv.create_factory(CountingEnv, None, 2)
    scheme = Scheme(
        DQN.create_factory(start_steps=8, update_every=8, mini_batch_size=4, lr=1e-2, target_update_interval=3),
        QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,)),
        ReplayBuffer.create_factory(100, rollout_size=4), envs, seed=1, runtime="simulated", num_grad_workers=2,
        grad_communication=communication)

    def target(worker):
        return worker.algo.learning_state()
    seen, checked = {}, set()
    for _ in range(12):
        scheme.step()
        local = scheme.update_worker.local_worker
        seen[local.actor_version] = target(local)
        for handle in scheme.update_worker.remote_workers:
            worker = handle.native.worker
            if worker.actor_version in seen:
                checked.add(worker.actor_version)
                for name, value in target(worker).items():
                    assert torch.equal(value, seen[worker.actor_version][name])
    assert max(checked) >= 6
    first, last = (torch.cat([value.flatten() for value in seen[version].values()]) for version in (1, 12))
    assert not torch.equal(first, last)
    scheme.stop()


def test_a_stochastic_evaluation_samples_from_the_policy():
    """Check that an evaluation with sampled actions samples from the trained policy.

    The purely random actions at the start of training are for collection only.
    """
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    actor = QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,))
    algo = DQN.create_factory(final_epsilon=0.0)
    evaluator = Evaluator(1, algo_factory=algo, actor_factory=actor, test_envs_factory=envs, seed=1)
    source = algo(actor=actor(seed=1), seed=1)
    with torch.no_grad():
        source.groups["q"].data.zero_()
        list(source.actor.parameters())[-1][1] = 1.0  # a bias of the last layer makes action 1 always the best
    weights = Weights(0, {name: value.numpy() for name, value in source.acting_state().items()})
    evaluation = evaluator.evaluate(weights, 10, deterministic=False)
    assert max(evaluation.lengths) <= 11  # the pole soon falls if the cart is always pushed to the same side
