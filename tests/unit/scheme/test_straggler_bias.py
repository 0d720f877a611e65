"""Check the bias of preempted rollouts where the expectation is known, and that finishing these rollouts removes it."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import A2C, ASYNC, DQN, GAEBuffer, OnPolicyActor, PPO, QActor, ReplayBuffer, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import CollectionError
from tests.unit.scheme.checkpointed import differences, go_on, through_a_file

FAST_STEPS, SLOW_STEPS = 4, 12  # steps of an episode
FAST_S, SLOW_S = 0.1, 1.0  # virtual seconds of a step
SIZE, LEAST = 24, 6  # steps of a full rollout, and of the shortest rollout that is preempted
FREE = {"start": 0, "message": 0, "step": 0, "grad": 0, "update": 0}
STRAGGLERS = {"col_fraction_workers": 0.75, "fraction_samples": LEAST / SIZE}
FINISH = {**STRAGGLERS, "on_straggler": "finish"}
RANDOM_COSTS = {**FREE, "step": ("exponential", 0.1), "grad": 0.1, "message": 0.01}
WAYS = {"collectors": {"num_col_workers": 4}, "ranks": {"num_grad_workers": 4, "distribute_gradients": True}}


class PacedEnv(gym.Env):
    """Environment with fast and slow episodes. A slow episode has more steps, slower steps and larger rewards.

    The observation is 1 in slow episodes and 0 in fast episodes; the reward is the observation plus 1.

    Args:
        is_drawn: Whether each episode is slow with probability 1/4. If not, all episodes of the environment that is
            built second are slow, and all episodes of the other environments are fast. (The environment that is built
            first only provides the spaces.)
    """

    clock, numbers = None, itertools.count()

    def __init__(self, is_drawn):
        self.observation_space, self.action_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32), gym.spaces.Discrete(2)
        self._is_drawn, self._is_slow = is_drawn, next(PacedEnv.numbers) == 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self._is_drawn:
            self._is_slow = self.np_random.random() < 0.25
        self._t = 0
        return np.array([self._is_slow], np.float32), {}

    def step(self, action):
        PacedEnv.clock.sleep(SLOW_S if self._is_slow else FAST_S)
        self._t += 1
        is_over = self._t == (SLOW_STEPS if self._is_slow else FAST_STEPS)
        return np.array([self._is_slow], np.float32), 1.0 + self._is_slow, is_over, False, {}


class Seen:
    """The data that the learners' storages have received, by storage.

    Attributes:
        sizes: Storage -> list of train batches, each a list of (source, number of steps) of its rollouts.
        observations: Storage -> list of all valid observations.
    """

    def __init__(self, base=GAEBuffer):
        seen = self
        self.sizes, self.observations = {}, {}

        class Watched(base):
            def insert_from(self, rollouts, sources):
                seen.sizes.setdefault(id(self), []).append(
                    [(source, rollout.num_steps) for source, rollout in zip(sources, rollouts, strict=True)])
                for rollout in rollouts:
                    obs = torch.as_tensor(rollout.obs["obs"])[:rollout.num_steps]
                    seen.observations.setdefault(id(self), []).extend(obs.flatten().tolist())
                super().insert_from(rollouts, sources)
        self.storage = Watched

    def steps_by_worker(self):
        """Return the number of received steps of each collector of each storage."""
        totals = Counter()
        for storage, batches in self.sizes.items():
            for source, num_steps in itertools.chain(*batches):
                totals[storage, source] += num_steps
        return totals


@pytest.fixture
def run(check_ledger):
    """Return a function that makes one update from each of `rounds` rounds of `PacedEnv`.

    The function returns (share of slow observations, finished episodes, `Seen`, virtual seconds, metrics).
    """
    def run_(rounds, is_drawn=False, **settings):
        PacedEnv.numbers, seen, episodes = itertools.count(), Seen(), []
        envs = VecEnv.create_factory(PacedEnv, {"is_drawn": is_drawn}, 1)
        scheme = Scheme(
            A2C.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space,
                                                               hidden_sizes=(4,)),
            seen.storage.create_factory(SIZE), envs, runtime="simulated", seed=1, costs=FREE, **settings)
        scheme.start()
        PacedEnv.clock, start = scheme.runtime, scheme.runtime.now()
        while scheme.version < rounds:
            scheme.step()
            check_ledger(scheme)
            episodes += scheme.update_worker.statistics.take_episodes()
        metrics, seconds, final = scheme.metrics(), scheme.runtime.now() - start, scheme.stop()
        assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())
        assert metrics["policy_lag"]["max"] == 0
        shares = list(itertools.chain(*seen.observations.values()))
        assert len(shares) == final["consumed_unique"]
        return float(np.mean(shares)), episodes, seen, seconds, metrics
    return run_


def means(episodes):
    """Return the mean length and the mean return of episodes."""
    return np.mean([episode.length for episode in episodes]), np.mean([episode.env_return for episode in episodes])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_finishing_stragglers_removes_the_bias_of_a_slow_worker(run, way):
    """Check what the learner receives if one of four workers is slow.

    If all workers contribute equally many steps, a quarter of the steps are slow. Of every 48 steps, 36 are then in 9
    fast episodes with a return of 4, and 12 are in a slow episode with a return of 24.
    """
    rounds, share = 10, 0.25
    length, mean_return = (36 + 12) / 10, (9 * 4 + 24) / 10
    waited, episodes, _, seconds, _ = run(rounds, **way)
    assert waited == share
    assert means(episodes) == pytest.approx((length, mean_return))
    assert seconds == pytest.approx(rounds * SIZE * SLOW_S)

    cut, episodes, _, seconds, metrics = run(rounds, **way, **STRAGGLERS)
    assert cut == pytest.approx(LEAST / (3 * SIZE + LEAST))  # about 0.08
    assert means(episodes)[0] < length - 0.5
    assert means(episodes)[1] < mean_return - 1.0
    assert seconds == pytest.approx(rounds * LEAST * SLOW_S)
    assert metrics["rollouts_preempted"] == rounds

    finished, episodes, seen, seconds, metrics = run(rounds, **way, **FINISH)
    owed = SIZE - LEAST
    assert finished == pytest.approx((rounds * SIZE - owed) / (4 * rounds * SIZE - owed))  # about 0.24
    assert sorted(seen.steps_by_worker().values()) == [rounds * SIZE - owed] + [rounds * SIZE] * 3
    assert means(episodes) == pytest.approx((length, mean_return), rel=2 * owed / (4 * rounds * SIZE))
    assert seconds == pytest.approx((rounds * SIZE - owed) * SLOW_S)
    assert metrics["rollouts_preempted"] == rounds  # the rests are not counted
    assert metrics["rollouts"] == 5 * rounds - 1


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_finishing_stragglers_keeps_the_distribution_of_slow_episodes(run, way):
    """Check what the learner receives if each episode is slow with probability 1/4, in less time than with waiting.

    The expected length is 1/4 · 12 + 3/4 · 4 = 6, the expected return is 1/4 · 24 + 3/4 · 4 = 9, and the expected share
    of slow steps is 1/4 · 12 / 6 = 1/2.
    """
    rounds = 25
    share, episodes, seen, seconds, metrics = run(rounds, is_drawn=True, **way, **FINISH)
    counts = seen.steps_by_worker().values()
    assert max(counts) <= rounds * SIZE
    assert min(counts) >= rounds * SIZE - (SIZE - LEAST)
    error = 4 * math.sqrt(0.25 * 0.75 / len(episodes))  # four standard errors of the share of slow episodes
    assert means(episodes) == (pytest.approx(6, abs=error * (SLOW_STEPS - FAST_STEPS)),
                               pytest.approx(9, abs=error * (24 - 4)))
    assert share == pytest.approx(0.5, abs=error)
    assert metrics["rollouts_preempted"] > 10
    assert seconds < 0.95 * run(rounds, is_drawn=True, **way)[3]


PATTERNS = {
    "central": {"num_col_workers": 4}, "thread": {"num_col_workers": 4, "grad_communication": ASYNC},
    "parallel": {"num_col_workers": 4, "num_grad_workers": 2},
    "parallel async": {"num_col_workers": 4, "num_grad_workers": 2, "grad_communication": ASYNC},
    "decentralized": {"num_col_workers": 4, "num_grad_workers": 2, "distribute_gradients": True},
    "ranks": {"num_grad_workers": 4, "distribute_gradients": True},
    "microbatches": {"num_col_workers": 4, "train_batch_size": 150, "microbatch_size": 20},
    "ranks, microbatches": {"num_grad_workers": 4, "distribute_gradients": True, "microbatch_size": 10},
}


@pytest.fixture
def make():
    """Return a function that makes simulated schemes; all of them are stopped after the test."""
    schemes = []

    def make_(algo=None, actor=OnPolicyActor, storage=None, env_fn=CountingEnv, **settings):
        envs = VecEnv.create_factory(env_fn, None, 2)
        schemes.append(Scheme(
            algo or PPO.create_factory(num_epochs=1, num_mini_batch=1),
            actor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,)),
            storage or GAEBuffer.create_factory(SIZE), envs,
            **{"runtime": "simulated", "seed": 1, "costs": RANDOM_COSTS} | settings))
        return schemes[-1]
    yield make_
    for scheme in schemes:
        scheme.stop()


@pytest.mark.parametrize("settings", PATTERNS.values(), ids=PATTERNS)
def test_workers_contribute_equally_many_steps_in_every_pattern(make, check_ledger, settings):
    """Check that each worker of a learner contributes as many full rollouts as the others, except for owed steps."""
    seen = Seen()
    scheme = make(storage=seen.storage.create_factory(SIZE), **FINISH, **settings)
    while scheme.version < 8:
        scheme.step()
        check_ledger(scheme)
    metrics, final = scheme.metrics(), scheme.stop()
    assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())
    assert metrics["rollouts_preempted"] > 5
    learners = {}
    for (storage, _), total in seen.steps_by_worker().items():
        learners.setdefault(None if settings.get("num_col_workers") is None else storage, []).append(total)
    assert [len(totals) for totals in learners.values()] == [4] * len(learners)
    for totals in learners.values():
        assert max(totals) % SIZE == 0
        assert max(totals) - (SIZE - LEAST) <= min(totals)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_without_stragglers_the_option_changes_nothing(make, way):
    """Check that equally fast workers with either option learn exactly the same as workers that wait for each other."""
    schemes = [make(costs={**FREE, "step": 0.1}, **way, **options) for options in ({}, STRAGGLERS, FINISH)]
    waiting, *others = [(go_on(scheme, 6), scheme.acting_state()["all"]) for scheme in schemes]
    for info, state in others:
        np.testing.assert_equal(info, waiting[0])
        assert torch.equal(state, waiting[1])


def test_every_step_is_used_once_and_in_order(make, recorder, check_ledger):
    """Check that, with random delays and a lost worker, no step of any environment is lost or used twice."""
    scheme = make(env_fn=recorder.env_fn, storage=recorder.storage.create_factory(SIZE), num_col_workers=4, **FINISH)
    go_on(scheme, 10)
    metrics = scheme.metrics()
    scheme.stop()
    assert metrics["rollouts_preempted"] > 5
    made, used = {}, {}
    for steps, found in ((made, recorder.made), (used, recorder.inserted)):
        for seed, *step in found:
            steps.setdefault(seed, []).append(step)
    assert len(used) == 8
    assert all(steps == made[seed][:len(steps)] for seed, steps in used.items())


@pytest.mark.parametrize(("rest", "failure"), [(True, "restart"), (False, "restart"), (True, "ignore")])
def test_a_lost_worker_leaves_its_owed_steps_to_its_replacement(make, check_ledger, rest, failure):
    """Check what is collected after a slow worker is lost, while it collects the rest of its rollout or afterwards."""
    seen = Seen()
    slow = {"costs": {**FREE, "step": FAST_S, "step@*/CWorker 3": SLOW_S}}
    scheme = make(storage=seen.storage.create_factory(SIZE), num_col_workers=4, on_worker_failure=failure, **slow,
                  **FINISH, faults=f"kill col.3 @ step {LEAST + (3 if rest else SIZE - LEAST + 3)}")
    go_on(scheme, 5)
    check_ledger(scheme)
    metrics, final = scheme.metrics(), scheme.stop()
    assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())
    ((batches,),) = [list(seen.sizes.values())]
    by_index = Counter()
    for (index, _), num_steps in itertools.chain(*batches):
        by_index[index] += num_steps
    if failure == "ignore":
        assert by_index == {1: 5 * SIZE, 2: 5 * SIZE, 4: 5 * SIZE, 3: LEAST}
    else:
        assert metrics["workers_restarted"] == 1
        assert by_index == {1: 5 * SIZE, 2: 5 * SIZE, 4: 5 * SIZE, 3: 5 * SIZE - (SIZE - LEAST)}


@pytest.mark.parametrize("way", [{"num_col_workers": 4}, {"num_grad_workers": 4, "distribute_gradients": True},
                                 {"num_col_workers": 4, "num_grad_workers": 2}], ids=["collectors", "ranks", "both"])
def test_a_resumed_run_equals_the_uninterrupted_run(make, check_ledger, way):
    """Check that a checkpoint cancels the owed steps, so that the saved and the resumed run are equal bit for bit."""
    costs = {**FREE, "step": FAST_S, "step@*/CWorker 3": SLOW_S, "step@GWorker 3/*": SLOW_S}
    settings = {**way, **FINISH, "costs": costs}
    straight, resumed = make(**settings), make(**settings)
    go_on(straight, 5)
    resumed.resume(through_a_file(straight.checkpoint()))
    np.testing.assert_equal(go_on(resumed, 5), go_on(straight, 5))
    assert straight.metrics()["rollouts_preempted"] == 2 * resumed.metrics()["rollouts_preempted"] >= 10
    assert differences(straight.checkpoint(), resumed.checkpoint()) == []
    assert check_ledger(resumed) == check_ledger(straight)
    assert resumed.stop() == straight.stop()


def test_rollouts_of_a_round_are_ordered_by_worker(make):
    """Check the order although the rest of worker 4 arrives before the rest of worker 3."""
    seen = Seen()
    costs = {**FREE, "step": FAST_S, "step@*/CWorker 3": SLOW_S, "step@*/CWorker 4": 0.9 * SLOW_S}
    scheme = make(storage=seen.storage.create_factory(SIZE), num_col_workers=4, costs=costs,
                  **FINISH | {"col_fraction_workers": 0.5})
    go_on(scheme, 2)
    ((first, second),) = seen.sizes.values()
    assert [(index, num_steps) for (index, _), num_steps in first] == [(1, SIZE), (2, SIZE), (3, LEAST), (4, LEAST)]
    assert [(index, num_steps) for (index, _), num_steps in second] == [
        (1, SIZE), (2, SIZE), (3, SIZE - LEAST), (3, LEAST), (4, SIZE - LEAST), (4, LEAST)]


def test_a_rest_of_an_unfinished_round_is_in_the_ledger(make):
    """Check the ledger of a run that ends because a round takes too long, after a rest of this round has arrived."""
    costs = {**FREE, "step": FAST_S, "step@*/CWorker 3": SLOW_S}
    scheme = make(num_col_workers=4, costs=costs, queue_timeout_s=(SIZE - LEAST + 1) * SLOW_S, **FINISH)
    scheme.step()
    with pytest.raises(CollectionError, match="CWorker 3"):
        scheme.step()
    final = scheme.stop()
    assert final["dropped"]["shutdown"] >= 2 * (3 * SIZE + SIZE - LEAST)
    assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())


def test_a_run_can_be_stopped_while_a_worker_collects_a_rest(make):
    """Check that an interrupted rest is not requested again, which would never end, and that no step is lost."""
    costs = {**FREE, "step": FAST_S, "step@*/CWorker 3": SLOW_S}
    scheme = make(num_col_workers=3, num_grad_workers=2, grad_communication=ASYNC, costs=costs,
                  **FINISH | {"col_fraction_workers": 0.5})
    while scheme.metrics()["rollouts_preempted"] < 2:
        scheme.step()
    final = scheme.stop()
    assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())


def test_replay_storages_accept_rests(make, check_ledger):
    """Check that off-policy learning stores both rollouts that a worker collects in one round."""
    scheme = make(DQN.create_factory(start_steps=48, update_every=48, num_updates=1), QActor,
                  ReplayBuffer.create_factory(2000, rollout_size=SIZE, n_step=3), num_col_workers=4, **FINISH)
    while scheme.metrics()["rollouts_preempted"] < 4:
        scheme.step()
        ledger = check_ledger(scheme)
    num_rounds = -(-ledger["collected"] // (4 * SIZE * 2))
    assert scheme.metrics()["rollouts"] >= 4 * num_rounds + 3
    assert ledger["resident"] + ledger["consumed_unique"] == ledger["collected"]
