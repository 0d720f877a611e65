"""Tests of `Scheme.checkpoint` and `resume`: a resumed run equals the uninterrupted run bit for bit."""

from __future__ import annotations

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import A2C, ASYNC, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.errors import CheckpointError, ConfigError, StoppedError
from tests.unit.scheme.checkpointed import AGENTS, SYNCHRONOUS, through_a_file, go_on, differences


@pytest.fixture
def make():
    """Return a function that makes schemes from an agent's name and settings; all are stopped after the test."""
    schemes = []

    def make_(agent="ppo, normalized", test_envs=None, **settings):
        schemes.append(Scheme(*AGENTS[agent](), test_envs, **{"runtime": "threads", "seed": 1} | settings))
        return schemes[-1]
    yield make_
    for scheme in schemes:
        scheme.stop()


def combinations():
    """Yield all pairs of agent and settings; the default run includes only one of the settings for most agents."""
    in_full = {"ppo, normalized"}
    for number, agent in enumerate(AGENTS):
        for place, (name, settings) in enumerate(SYNCHRONOUS.items()):
            is_usual = agent in in_full or (number + place) % len(SYNCHRONOUS) == 0
            yield pytest.param(agent, settings, id=f"{agent}-{name}", marks=[] if is_usual else [pytest.mark.thorough])


@pytest.mark.parametrize(("agent", "settings"), list(combinations()))
def test_a_resumed_run_equals_the_uninterrupted_run(make, check_ledger, agent, settings):
    straight = make(agent, **settings)
    straight.start(target_steps=600)
    go_on(straight, 6)
    snapshot = straight.checkpoint()
    checkpoint = through_a_file(snapshot)
    resumed = make(agent, **settings)
    resumed.resume(checkpoint)
    resumed.start(target_steps=600)
    assert (resumed.version, resumed.ledger()) == (straight.version, straight.ledger())
    assert check_ledger(resumed)["in_flight"] == 0
    # Compare all statistics, and a second checkpoint of both schemes. A checkpoint includes parameters, optimizers,
    # replay and the ledger.
    np.testing.assert_equal(go_on(resumed, 3), go_on(straight, 3))
    assert resumed.metrics()["policy_lag"] == straight.metrics()["policy_lag"]
    assert differences(straight.checkpoint(), resumed.checkpoint()) == []
    assert differences(snapshot, checkpoint) == []  # later steps have not changed it, so it may be written meanwhile
    assert check_ledger(resumed) == check_ledger(straight)
    assert resumed.stop() == straight.stop()


@pytest.mark.parametrize("settings", SYNCHRONOUS.values(), ids=SYNCHRONOUS.keys())
def test_a_partly_used_train_batch_is_discarded(make, check_ledger, settings):
    straight, resumed = make(**settings), make(**settings)
    straight.start(600)
    go_on(straight, 4)
    straight.step()  # the first of four updates from this train batch
    assert not straight.is_between_train_batches
    resumed.resume(through_a_file(straight.checkpoint()))
    resumed.start(600)
    assert straight.is_between_train_batches
    np.testing.assert_equal(go_on(resumed, 3), go_on(straight, 3))
    assert differences(straight.checkpoint(), resumed.checkpoint()) == []
    assert check_ledger(resumed) == check_ledger(straight)


def test_a_checkpoint_changes_later_random_numbers(make):
    """Check that two checkpoints with no update between them differ in generators, not in parameters or optimizers."""
    scheme = make("sac")
    scheme.start(600)
    go_on(scheme, 9)
    first, second = scheme.checkpoint(), scheme.checkpoint()
    changed = differences(first, second)
    assert "/part" in changed
    assert any("generator" in name for name in changed)
    assert not any("optimizers" in name or "acting" in name for name in changed)


def test_every_pattern_resumes_with_an_exact_ledger(check_ledger, some_pattern):
    schemes = [Scheme(*synthetic_agent(size=4, num_epochs=2, num_mini_batch=2), runtime="simulated", seed=1,
                      **some_pattern)
               for _ in range(2)]
    first, second = schemes
    try:
        for _ in range(7):
            first.step()
        second.resume(through_a_file(first.checkpoint()))
        second.start()
        assert second.version == first.version
        assert check_ledger(second) == check_ledger(first)
        before = second.ledger()
        for _ in range(5):
            second.step()
        after = second.stop()
        assert after["collected"] > before["collected"]
        assert after["consumed_unique"] > before["consumed_unique"]
        assert after["collected"] == after["consumed_unique"] + sum(after["dropped"].values())
    finally:
        for scheme in schemes:
            scheme.stop()


@pytest.mark.parametrize("runtime", ["simulated", "threads"])
@pytest.mark.parametrize("settings", [
    {"num_col_workers": 3}, {"num_col_workers": 1}, {"num_col_workers": 3, "queue_size": 4, "col_in_flight": 2},
    {"num_col_workers": 2, "grad_communication": ASYNC}, {"num_col_workers": 1, "grad_communication": ASYNC},
    {"num_col_workers": 2, "queue_policy": "drop_newest", "queue_size": 4},
    {"num_col_workers": 3, "num_passes": 2, "minibatch_buffer_size": 3, "grad_communication": ASYNC},
    {"num_col_workers": 3, "faults": "kill col.2 @ step 30"},
], ids=str)
def test_a_checkpoint_uses_what_was_collected(check_ledger, settings, runtime):
    """Check that no rollout is dropped by checkpoints, and that both runs continue from them.

    Every rollout is a train batch, so no train batch is incomplete.
    """
    if runtime == "threads":
        settings = {name: value for name, value in settings.items() if name != "faults"}
    schemes = [Scheme(*synthetic_agent(size=4, num_epochs=2, num_mini_batch=2), runtime=runtime, seed=1,
                      col_communication=ASYNC, **settings) for _ in range(2)]
    first, second = schemes
    try:
        for _ in range(3):
            for _ in range(7):
                first.step()
            version = first.version
            state = through_a_file(first.checkpoint())
            ledger = check_ledger(first)
            assert ledger["dropped"]["shutdown"] == ledger["in_flight"] == ledger["queued"] == 0
            assert first.version >= version
            assert ledger["dropped"]["queue_full"] + ledger["dropped"]["worker_lost"] + ledger["consumed_unique"
                                                                                            ] == ledger["collected"]
        assert first.version > 21
        second.resume(state)
        second.start()
        assert second.ledger() == ledger
        assert second.version == first.version
        for scheme in schemes:
            for _ in range(5):
                scheme.step()
    finally:
        for scheme in schemes:
            scheme.stop()


def test_a_checkpoint_may_drop_what_was_collected(make):
    scheme = make("ppo, gru", num_col_workers=2, col_communication=ASYNC, runtime="simulated")
    for _ in range(4):
        scheme.step()
    version = scheme.version
    scheme.checkpoint(uses_queued=False)
    assert scheme.version == version
    assert scheme.ledger()["dropped"]["shutdown"] > 0


@pytest.mark.every(3)
@pytest.mark.parametrize("num_replay_workers", [1, 3])
@pytest.mark.parametrize("agent", ["dqn, prioritised", "impala", "two policies, dqn"])
def test_shards_resume_with_their_contents(check_ledger, agent, num_replay_workers):
    def make():
        return Scheme.apex(*AGENTS[agent](), runtime="simulated", seed=1, num_replay_workers=num_replay_workers,
                           size=300,
                           learning_starts=40, max_replay_ratio=2.0, train_batch_size=8, max_weight_sync_delay=16)
    first, second = make(), make()
    try:
        for _ in range(8):
            first.step()
        snapshot = first.checkpoint()
        checkpoint = through_a_file(snapshot)
        second.resume(checkpoint)
        second.start()
        held = [worker.update_worker.local_worker.shards for worker in (first, second)]
        assert [state.resident for state in held[1].states] == [state.resident for state in held[0].states]
        assert [state.mass for state in held[1].states] == [state.mass for state in held[0].states]
        assert [shards.trained for shards in held] == [first.ledger()["consumed"]] * 2
        # `added` is restored, so that learning does not wait for `learning_starts` again.
        assert [shards.added for shards in held] == [first.ledger()["collected"]] * 2
        assert check_ledger(second) == check_ledger(first)
        assert second.ledger()["resident"] == sum(state.resident for state in held[1].states) > 0
        for _ in range(5):
            first.step()
            second.step()
        assert differences(snapshot, checkpoint) == []
        ledger = check_ledger(second)
        assert ledger["consumed"] <= 2.0 * (ledger["collected"] - 40)  # the ratio includes steps before the checkpoint
        final = second.stop()
        assert final["collected"] == final["resident"] + final["evicted"] + sum(final["dropped"].values())
    finally:
        first.stop()
        second.stop()


@pytest.mark.parametrize("shards", [0, 2])
@pytest.mark.parametrize("agent", ["dqn, prioritised", "r2d2", "r2d2, whole rollouts", "two policies, dqn"])
def test_a_checkpoint_contains_no_empty_places_of_a_replay(agent, shards, tmp_path):
    """Check that the size of a checkpoint depends on the rollouts in replay, also if shards keep them elsewhere."""
    settings = {"num_replay_workers": shards, "col_communication": "asynchronous"} if shards else {}
    algo, actor, storage, envs = AGENTS[agent]()
    large = dataclasses.replace(storage, options=with_size(storage.options, 100_000))
    scheme = Scheme(algo, actor, large, envs, num_col_workers=2, runtime="simulated", seed=1, **settings)
    scheme.step()
    checkpoint = scheme.checkpoint()
    scheme.stop()
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    assert (tmp_path / "checkpoint.pt").stat().st_size < 300_000  # one number for each empty place is 800,000 bytes


def with_size(options, size):
    """Return options of a replay with another size, which the storage of each policy has, too."""
    changed = {"size": size}
    if hasattr(options, "policies"):
        changed["policies"] = {name: dataclasses.replace(own, options=with_size(own.options, size))
                               for name, own in options.policies.items()}
    return dataclasses.replace(options, **changed)


def test_residuals_of_lossy_gradients_are_kept(make):
    settings = {"num_grad_workers": 2, "compress_grads_to_send": "topk"}
    scheme = make(**settings)
    scheme.start(600)
    go_on(scheme, 5)
    checkpoint = through_a_file(scheme.checkpoint())
    kept = [worker["remainders"][0] for worker in checkpoint["state"]["workers"]]
    assert all(remainder.abs().sum() > 0 for remainder in kept)
    assert not torch.equal(*kept)
    without = through_a_file(checkpoint)
    for worker in without["state"]["workers"]:
        worker["remainders"] = {}
    ends = []
    for state in (checkpoint, without):
        resumed = make(**settings)
        resumed.resume(state)
        resumed.start(600)
        go_on(resumed, 5)
        ends.append(resumed.acting_state()["all"])
    go_on(scheme, 5)
    assert torch.equal(ends[0], scheme.acting_state()["all"])
    assert not torch.equal(ends[1], ends[0])


def test_the_seed_of_the_checkpoint_is_used_unless_another_is_given(make):
    scheme = make(seed=None)
    go_on(scheme, 3)
    checkpoint = scheme.checkpoint()
    resumed = make(seed=None)
    resumed.resume(checkpoint)
    assert resumed.seed == scheme.seed == resumed.settings["seed"]
    with pytest.raises(CheckpointError, match=f"seed was {scheme.seed}, now it is 5"):
        make(seed=5).resume(checkpoint)


def test_another_agent_is_refused_with_all_differences(make):
    scheme = make()
    go_on(scheme, 3)
    checkpoint = scheme.checkpoint()
    text = r"col_execution was 'Central', now it is 'Parallel'.*algo_factory: class was PPO, now it is A2C"
    with pytest.raises(CheckpointError, match=text):
        make("a2c, continuous", num_col_workers=2).resume(checkpoint)


def test_a_run_can_be_resumed_on_another_runtime(make):
    straight = make(num_col_workers=2)
    straight.start(600)
    go_on(straight, 4)
    checkpoint = straight.checkpoint()
    elsewhere = make(num_col_workers=2, runtime="simulated", on_worker_failure="raise", worker_timeout_s=5.0,
                     test_envs=VecEnv.create_factory("CartPole-v1"))
    elsewhere.resume(checkpoint)
    elsewhere.start(600)
    go_on(straight, 4)
    go_on(elsewhere, 4)
    assert torch.equal(straight.acting_state()["all"], elsewhere.acting_state()["all"])


def test_invalid_checkpoints_and_calls_are_refused(make, tmp_path):
    scheme = make()
    go_on(scheme, 2)
    checkpoint = scheme.checkpoint()
    with pytest.raises(ConfigError, match="has not been started"):
        scheme.resume(checkpoint)
    with pytest.raises(ConfigError, match="leave record and replay out"):
        make(record=str(tmp_path / "record")).resume(checkpoint)
    with pytest.raises(CheckpointError, match="its format is 'pytorchrl checkpoint 0'"):
        make().resume({**checkpoint, "format": "pytorchrl checkpoint 0"})
    with pytest.raises(ConfigError, match="timeout_s"):
        scheme.checkpoint(timeout_s=0)
    scheme.stop()
    with pytest.raises(StoppedError, match="make checkpoints before"):
        scheme.checkpoint()
    recorded = make(record=str(tmp_path / "record"))
    go_on(recorded, 1)
    with pytest.raises(ConfigError, match="recorded or replayed"):
        recorded.checkpoint()


class Remembering(gym.Env):
    """An environment whose observation and reward are the number of episodes that the object has begun.

    The class records the seeds passed to `reset`, and counts the open environments.
    """

    observation_space, action_space = gym.spaces.Box(0.0, 100.0, (2,)), gym.spaces.Discrete(2)
    seeds: list[int | None] = []  # noqa: RUF012 - shared on purpose: the test reads it
    open = 0

    def __init__(self):
        type(self).open += 1
        self.episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episodes += 1
        return np.full(2, self.episodes, np.float32), {}

    def step(self, action):
        return np.full(2, self.episodes, np.float32), float(self.episodes), self.np_random.random() < 0.3, False, {}

    def close(self):
        type(self).open -= 1


def test_environments_are_rebuilt_with_new_seeds():
    envs = VecEnv.create_factory(Remembering, None, 2)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,))

    def make():
        return Scheme(A2C.create_factory(), actor, GAEBuffer.create_factory(8), envs, seed=1)
    scheme, other = make(), make()
    Remembering.seeds.clear()  # discard the seeds of environments that were probed for their spaces
    for _ in range(3):
        scheme.step()
    other.resume(scheme.checkpoint())
    for _ in range(3):
        scheme.step()
        other.step()
    assert torch.equal(other.acting_state()["all"], scheme.acting_state()["all"])
    given = [seed for seed in Remembering.seeds if seed is not None]
    assert len(given) == 6  # two seeds before the checkpoint, two after it, and the same two in the resumed scheme
    assert len(set(given)) == 4
    scheme.stop()
    other.stop()
    assert Remembering.open == 0


def test_rates_of_a_resumed_run_exclude_the_earlier_run(make):
    scheme, resumed = make(), make()
    go_on(scheme, 20)
    resumed.resume(through_a_file(scheme.checkpoint()))
    resumed.start()
    assert resumed.metrics()["collected_steps_per_s"] == 0.0
    go_on(resumed, 1)
    metrics = resumed.metrics()
    consumed = metrics["grad_peak_steps_per_s"] * metrics["time_s"]["gradients"]["grad"]
    assert consumed == pytest.approx(resumed.ledger()["consumed"] - scheme.ledger()["consumed"])


@pytest.mark.parametrize(("device", "grad_device", "message"), [
    ("cpu", "cpu", None), ("cpu", None, None),
    ("cuda:0", None, "bit for bit: device was 'cuda', now it is 'cpu'\n"),
    ("cpu", "cuda", "bit for bit: grad_device was 'cuda', now it is 'cpu'"),
], ids=str)
def test_a_run_resumes_on_another_device_with_a_warning_if_it_is_of_another_kind(
        make, caplog, device, grad_device, message):
    scheme = make(num_grad_workers=2)
    go_on(scheme, 2)
    checkpoint = scheme.checkpoint()
    checkpoint["settings"] |= {"device": device, "grad_device": grad_device}
    resumed = make(num_grad_workers=2)
    resumed.resume(checkpoint)
    go_on(resumed, 2)
    assert (message in caplog.text) if message else ("device" not in caplog.text)
