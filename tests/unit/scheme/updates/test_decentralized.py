"""Check that ranks, which average gradients among themselves, equal each other and a central learner, even if a rank is
lost."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytorchrl import (
    DQN, PPO, SAC, GAEBuffer, OffPolicyActor, OnPolicyActor, PERBuffer, QActor, ReplayBuffer, Scheme, VecEnv)
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.runtime import Journal
from pytorchrl.errors import NoWorkersLeft, RankLostError, RanksDifferError, WorkerLostError
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.gradients.process_group import ProcessGroup
from pytorchrl.scheme.updates.decentralized import DecentralizedUpdates
from pytorchrl.scheme.updates.remote import RemoteUpdates
from tests.unit.scheme.conftest import chessboard

REPLAY = {"start_steps": 16, "update_every": 8, "num_updates": 4, "mini_batch_size": 8}


def ppo(envs):
    return (PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=1e-3, advantage_normalization="batch"),
            OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,),
                                         normalize_obs=True),
            GAEBuffer.create_factory(8))


def rnd(envs):
    _, actor, storage = ppo(envs)
    return PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=1e-3, intrinsic_reward="rnd",
                              predictor_proportion=0.5), actor, storage


def sac(envs):
    return (SAC.create_factory(**REPLAY, lr_alpha=1e-2), OffPolicyActor.create_factory(
        envs.observation_space, envs.action_space, hidden_sizes=(8,), normalize_obs=True),
        ReplayBuffer.create_factory(200, rollout_size=4))


def dqn(envs):
    return (DQN.create_factory(**REPLAY, target_update_interval=3, lr=1e-3),
            QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
            ReplayBuffer.create_factory(200, rollout_size=4))


def per(envs):
    algo, actor, _ = dqn(envs)
    return algo, actor, PERBuffer.create_factory(200, rollout_size=4)


AGENTS = {"ppo": (ppo, CountingEnv), "sac": (sac, "Pendulum-v1"), "dqn": (dqn, CountingEnv), "per": (per, CountingEnv),
          "rnd": (rnd, CountingEnv)}


@pytest.fixture
def make():
    """Return a function that makes a scheme of one of `AGENTS`; by default, it is simulated and decentralized."""
    schemes = []

    def make_(agent="ppo", **settings):
        parts, env = AGENTS[agent]
        envs = VecEnv.create_factory(env, None, 2)
        schemes.append(Scheme(*parts(envs), envs, **{
            "seed": 1, "runtime": "simulated", "num_grad_workers": 2, "distribute_gradients": True} | settings))
        return schemes[-1]
    yield make_
    for scheme in schemes:
        scheme.stop()


def workers(scheme):
    """Return the live gradient workers."""
    gone = scheme.update_worker.strategy.supervisor.gone
    return [handle.native.worker for index,
            handle in enumerate(scheme.update_worker.remote_workers) if index not in gone]


def flat(state, name=""):
    """Return a dict of all tensors that updates depend on, except random generators, noise and schedules."""
    if isinstance(state, dict):
        return {key: value for part,
                inner in state.items() if part not in ("generator", "update_generator", "noise", "schedules")
                for key, value in flat(inner, f"{name}/{part}").items()}
    return {name: torch.as_tensor(state)}


def whole(worker):
    return flat(worker.algo.state_dict()) | {"version": torch.tensor(worker.actor_version)}


def assert_equal(ranks):
    first = whole(ranks[0])
    assert any("optimizers" in name for name in first)
    for rank in ranks[1:]:
        state = whole(rank)
        assert state.keys() == first.keys()
        assert [name for name in first if not torch.equal(first[name], state[name])] == []


def train(scheme, updates, check=lambda scheme: None):
    while scheme.version < updates:
        scheme.step()
        check(scheme)


# Equality with a central learner


@pytest.mark.parametrize(("agent", "num_workers"), chessboard(AGENTS, (2, 3)))
def test_ranks_equal_a_central_learner(make, agent, num_workers):
    """Check the acting state and the learning state, including target networks, temperature and normalizers."""
    states = []
    for distribute in (False, True):
        scheme = make(agent, num_grad_workers=num_workers, distribute_gradients=distribute)
        start = None
        while scheme.version < 20:
            start = scheme.acting_state() if start is None else start
            scheme.step()
        if distribute:
            assert_equal(workers(scheme))
            assert len({worker.algo.generator.get_state().numpy().tobytes()
                        for worker in workers(scheme)}) == num_workers
        algo = (workers(scheme)[0] if distribute else scheme.update_worker.local_worker).algo
        states.append(algo.acting_state() | algo.learning_state())
        pulled = scheme.acting_state()
        assert all(torch.equal(states[-1][name], value) for name, value in pulled.items())
    central, ranks = states
    assert any(not torch.equal(start[name], ranks[name]) for name in start)  # training has changed the parameters
    for name, value in central.items():
        torch.testing.assert_close(ranks[name], value, rtol=1e-6, atol=1e-6, msg=lambda text,
                                   name=name: f"{name}: {text}")


# After a loss


@pytest.mark.every(3)
@pytest.mark.parametrize("policy", ["restart", "ignore"])
@pytest.mark.parametrize(("agent", "fault"), [
    ("ppo", "kill grad.1 @ grad 6"), ("ppo", "kill grad.2 @ update 8"), ("ppo", "kill grad.3 @ update 1"),
    ("ppo", "kill grad.1 @ grad 5; kill grad.2 @ grad 5"), ("ppo", "hang grad.2 @ grad 6"),
    ("ppo", "kill grad.2 @ grad 1"),
    ("sac", "kill grad.1 @ update 5"), ("dqn", "kill grad.3 @ grad 6")])
def test_other_ranks_continue_and_are_equal(make, check_ledger, agent, fault, policy):
    scheme = make(agent, num_grad_workers=3, faults=fault, on_worker_failure=policy)
    train(scheme, 16, check_ledger)
    lost = fault.count("grad.")
    left = workers(scheme)
    assert len(left) == (3 if policy == "restart" else 3 - lost)
    assert_equal(left)
    assert len({worker.algo.generator.get_state().numpy().tobytes() for worker in left}) == len(left)
    assert [worker.actor_version for worker in left] == [16] * len(left)
    metrics = scheme.metrics()
    assert 1 <= metrics["regroups"] <= lost
    assert metrics["workers_restarted"] == (lost if policy == "restart" else 0)
    assert metrics["grads_held"] == 0
    scheme.stop()
    check_ledger(scheme)


def test_a_new_rank_has_a_new_incarnation(make):
    scheme = make(faults="kill grad.2 @ grad 6")
    train(scheme, 8)
    assert [worker._incarnation for worker in workers(scheme)] == [0, 1]


@pytest.mark.parametrize("settings", [{"num_col_workers": 2}, {"num_col_workers": 1, "col_fraction_workers": 0.5}])
def test_ranks_with_collectors_or_preemption_survive_losses(make, check_ledger, settings):
    scheme = make(num_grad_workers=3, faults="kill grad.2 @ update 6; kill grad.1 @ grad 11", **settings)
    train(scheme, 20, check_ledger)
    assert scheme.metrics()["regroups"] == 2
    assert_equal(workers(scheme))


def test_a_rank_lost_while_collecting_costs_the_others_no_data(make, check_ledger):
    """Check that the other ranks keep the data that they have collected, because no rank has used any of these data."""
    costs = {"start": 0, "message": 0, "step": 0.1, "grad": 0, "update": 0}
    scheme = make(num_grad_workers=3, col_fraction_workers=0.6, fraction_samples=0.5, faults="kill col.2.0 @ step 12",
                  costs=costs)
    train(scheme, 12, check_ledger)
    assert scheme.metrics()["regroups"] == scheme.metrics()["workers_restarted"] == 1
    assert sum(scheme.stop()["dropped"].values()) == 0


def break_off_once(monkeypatch, worker_index, number):
    """Make rank `worker_index` raise `RankLostError` after its `number`-th call of `ProcessGroup.mean`.

    The rank behaves as if its connections had broken. The call itself is completed by all ranks.
    """
    right, calls = ProcessGroup.mean, []

    def mean(self, *args, **kwargs):
        result = right(self, *args, **kwargs)
        if getattr(self, "watched", False):
            calls.append(1)
            if len(calls) == number:
                raise RankLostError("planted")
        return result
    monkeypatch.setattr(ProcessGroup, "mean", mean)
    join = GWorker.join_group

    def join_group(self, *args, **kwargs):
        self._group.watched = self.index_worker == worker_index
        join(self, *args, **kwargs)
    monkeypatch.setattr(GWorker, "join_group", join_group)


@pytest.mark.parametrize("late", [1, 2, 3])
def test_an_update_that_one_rank_applied_is_made_by_all(make, check_ledger, monkeypatch, late):
    """Check that all ranks become equal again after one rank fails to apply the sixth update.

    No worker is lost.
    """
    break_off_once(monkeypatch, late, 6)
    scheme = make(num_grad_workers=3)
    train(scheme, 5)
    scheme.step()
    check_ledger(scheme)
    ranks = workers(scheme)
    # The step continues until all ranks complete the same update, here the seventh update.
    assert scheme.version == 7
    assert [rank.actor_version for rank in ranks] == [7] * 3
    assert_equal(ranks)
    assert scheme.metrics()["regroups"] == 1
    assert scheme.metrics()["workers_restarted"] == 0
    assert scheme.metrics()["grads_applied"] == 7 * 3 - 1
    scheme.stop()
    check_ledger(scheme)


def test_an_update_that_no_rank_applied_is_discarded(make, check_ledger, monkeypatch):
    """Check that the sixth update, which fails on all ranks, is repeated with new data."""
    right, failed = ProcessGroup.mean, set()

    def mean(self, *args, **kwargs):
        result = right(self, *args, **kwargs)
        self.means = getattr(self, "means", 0) + 1
        if self.means == 6 and id(self) not in failed:
            failed.add(id(self))
            raise RankLostError("planted")
        return result
    monkeypatch.setattr(ProcessGroup, "mean", mean)
    scheme = make(num_grad_workers=3)
    train(scheme, 6, check_ledger)
    assert scheme.version == 6
    assert_equal(workers(scheme))
    assert scheme.metrics()["grads_applied"] == 6 * 3
    assert scheme.stop()["dropped"]["worker_lost"] > 0


def test_repeated_failures_of_a_rank_group_end_the_run(make, monkeypatch):
    scheme = make()
    train(scheme, 3)

    def mean(self, *args, **kwargs):
        raise RankLostError("the network is down")
    monkeypatch.setattr(ProcessGroup, "mean", mean)
    message = r"broke up 3 times in a row, although no worker was lost.*network is down"
    with pytest.raises(WorkerLostError, match=message):
        scheme.step()


def test_breakups_spread_over_a_long_run_do_not_end_it(make, monkeypatch):
    """Check one breakup before each of six updates: no three of them follow each other without an update."""
    scheme, failing, exchange = make(), {3, 5, 6, 7, 9, 10}, ProcessGroup.mean

    def mean(self, *args, **kwargs):
        if scheme.version in failing:
            failing.remove(scheme.version)
            raise RankLostError("the network is down for a moment")
        return exchange(self, *args, **kwargs)
    monkeypatch.setattr(ProcessGroup, "mean", mean)
    train(scheme, 12)
    assert (failing, scheme.metrics()["workers_restarted"]) == (set(), 0)
    assert_equal(workers(scheme))


class Forming(SimpleNamespace):
    """A strategy whose attempts to form a group have given outcomes: True, False, or "lost" after a loss."""

    def __init__(self, *outcomes, num_lost=0):
        super().__init__(_is_broken=True, _num_lost=num_lost, _num_breakups=0, _generation=1, _ranks=[0],
                         _cause=RankLostError("down"), _gather=lambda: None, outcomes=list(outcomes))

    def _try_to_form_group(self):
        outcome = self.outcomes.pop(0)
        self._num_lost += outcome == "lost"
        return outcome is True


def test_each_loss_counts_and_breaks_the_group_once(monkeypatch):
    monkeypatch.setattr(RemoteUpdates, "_on_lost", lambda self, index: None)
    signals, updates = [], DecentralizedUpdates.__new__(DecentralizedUpdates)
    updates.__dict__.update(_num_lost=0, _ranks=[0, 1, 2], _is_broken=False, _generation=4, _workers=[
        SimpleNamespace(signal=lambda method, generation, index=index: signals.append((index, generation)))
        for index in range(3)])
    updates._on_lost(1)
    updates._on_lost(0)
    assert (updates._num_lost, updates._ranks, signals) == (2, [2], [(0, 4), (2, 4)])


def test_a_new_group_starts_with_new_train_batches_and_books_the_aborted_update_once():
    """Check the state after a group has been formed, of a strategy that was about to skip the rest of a train batch."""
    dropped, updates = [], DecentralizedUpdates.__new__(DecentralizedUpdates)
    statistics = SimpleNamespace(
        tree_ledger=SimpleNamespace(report=lambda *_: None), drop=lambda gradient, reason: dropped.append(gradient),
        counters=SimpleNamespace(weight_pushes=0, regroups=0))
    candidate = SimpleNamespace(version=5, incarnation=0, ledger=None, address="", port=0)
    updates.__dict__.update(
        _skip=True, _used_up=False, _ranks=[0, 2], _generation=3, _updates=5, _pulled=True, _timeout_s=1.0,
        _aborted=["first", "second"], _statistics=statistics, supervisor=SimpleNamespace(gone={1}),
        _workers=[SimpleNamespace(submit=lambda *_: None)] * 3, _runtime=SimpleNamespace(put=lambda state: state),
        _ask=lambda calls: dict.fromkeys(calls, candidate), _state_of=lambda source: candidate)
    for _ in range(2):
        assert updates._try_to_form_group()
    assert (updates._ranks, updates._skip, updates._used_up, updates._generation) == ([0, 2], False, True, 5)
    assert dropped == ["first", "second"]
    assert (statistics.counters.regroups, statistics.counters.weight_pushes, updates._pulled) == (2, 2, False)


class Pending:
    """Requests to workers, whose answers arrive in a given order, some at each poll."""

    def __init__(self, *polls):
        self.polls, self.open = list(polls), []

    def __len__(self):
        return len(self.open)

    def owners(self):
        return list(self.open)

    def add(self, index, future):
        self.open.append(index)

    def poll(self, timeout_s):
        for index in self.polls.pop(0):
            self.open.remove(index)
            yield index, (index, None)


def test_preemptions_carry_the_number_of_the_collection_that_they_end():
    """Check two collections of four ranks, in which two ranks are enough."""
    calls, signals = [], []

    class Rank:
        def __init__(self, index):
            self.index = index

        def submit(self, method, *_, number, **more):
            calls.append((self.index, number))

        def signal(self, method, number):
            signals.append((self.index, number))
    updates = DecentralizedUpdates.__new__(DecentralizedUpdates)
    updates.__dict__.update(
        _num_prepared=0, _skip=False, _ranks=[0, 1, 2, 3], _workers=[Rank(index) for index in range(4)],
        _runtime=SimpleNamespace(now=lambda: 0.0), _journal=Journal(), _statistics=SimpleNamespace(
            add_journal_part=lambda part: None),
        in_flight=Pending([3], [1], [], [0, 2], [0, 1, 2], [3]),
        supervisor=SimpleNamespace(is_replacing=False, deadline_s=lambda index: 60.0))
    updates._prepare(({}, {}), 2)
    assert calls == [(index, 1) for index in range(4)]
    assert signals == [(0, 1), (2, 1)] * 2  # at each poll after two ranks have finished
    del calls[:], signals[:]
    updates._prepare(({}, {}), 2)
    assert calls == [(index, 2) for index in range(4)]
    assert signals == [(3, 2)]


@pytest.mark.parametrize(("outcomes", "num_lost", "left"), [
    ([False, False, True], 0, 0), ([False, False, False, True], 0, 1), ([False, False, False, True], 1, 1),
    ([False, False, "lost", False, False, True], 0, 0), ([False, False, "lost", False, False, False, True], 0, 1)])
def test_three_breakups_in_a_row_without_a_loss_end_the_run(outcomes, num_lost, left):
    """Check after how many failed attempts the run ends; a loss starts the count anew."""
    strategy = Forming(*outcomes, num_lost=num_lost)
    if left:
        with pytest.raises(WorkerLostError, match="broke up 3 times in a row"):
            DecentralizedUpdates._form_new_group(strategy)
    else:
        DecentralizedUpdates._form_new_group(strategy)
    assert len(strategy.outcomes) == left


def test_losing_all_ranks_loses_the_parameters(make):
    scheme = make(faults="kill grad.* @ grad 6")
    with pytest.raises(NoWorkersLeft, match="were lost together"):
        train(scheme, 10)
    with pytest.raises(WorkerLostError):
        scheme.acting_state()


@pytest.mark.parametrize("settings", [{"on_worker_failure": "raise"}, {"record": "run"}], ids=["raise", "recorded"])
def test_a_lost_rank_ends_the_run_without_replacement(make, tmp_path, settings):
    if "record" in settings:
        settings["record"] = tmp_path / "run"
    scheme = make(faults="kill grad.1 @ grad 6", **settings)
    with pytest.raises(WorkerLostError, match="GWorker 1 has been killed"):
        train(scheme, 10)


@pytest.mark.parametrize("policy", ["restart", "ignore"])
def test_ranks_can_be_connected_by_gloo(make, check_ledger, policy):
    scheme = make(runtime="threads", num_grad_workers=3, on_worker_failure=policy)
    train(scheme, 3)
    for _ in range(1 if policy == "restart" else 2):  # two losses leave a group of one rank
        index = next(index for index in range(3) if index not in scheme.update_worker.strategy.supervisor.gone)
        handle = scheme.update_worker.remote_workers[index]
        handle.runtime.kill(handle)
        train(scheme, scheme.version + 5, check_ledger)
    assert_equal(workers(scheme))
    assert len(workers(scheme)) == (3 if policy == "restart" else 1)
    assert scheme.metrics()["regroups"] == (1 if policy == "restart" else 2)


# Models are read from the ranks


def test_a_model_is_pulled_from_the_first_remaining_rank(make, tmp_path):
    scheme = make(num_grad_workers=3, faults="kill grad.1 @ grad 7", on_worker_failure="ignore")
    asked = []
    for update in (4, 10):
        train(scheme, update)
        saved = torch.load(scheme.save_model(str(tmp_path / f"{update}.pt")), weights_only=True)
        first = workers(scheme)[0]
        asked.append(first.index_worker)
        assert saved["version"] == first.actor_version == update
        assert torch.equal(saved["acting_state"]["all"], first.algo.acting_state()["all"])
    assert asked == [1, 2]


def test_a_model_can_be_pulled_before_a_lost_rank_is_noticed(make):
    scheme = make()
    train(scheme, 4)
    handle = scheme.update_worker.remote_workers[0]
    handle.runtime.kill(handle)
    assert torch.equal(scheme.acting_state()["all"], workers(scheme)[1].algo.acting_state()["all"])


# Comparison of ranks


@pytest.mark.parametrize(("every", "found_at"), [(5, 5), (3, 6), (100, None), (None, None)])
def test_parameters_of_ranks_are_compared_at_intervals(make, monkeypatch, every, found_at):
    monkeypatch.setattr(DecentralizedUpdates, "check_interval", every)
    scheme = make(num_grad_workers=3)
    train(scheme, 4)
    workers(scheme)[1].algo.groups["all"].data[3] += 1e-7
    if found_at is None:
        train(scheme, 12)
        return
    with pytest.raises(RanksDifferError,
                       match=rf"after update {found_at} .* GWorker 2 \(rank 1, version {found_at}\).*other 2 ranks"):
        train(scheme, 12)
    assert scheme.version == found_at - 1


def test_parameters_not_used_for_acting_are_also_compared(make, monkeypatch):
    monkeypatch.setattr(DecentralizedUpdates, "check_interval", 10)
    scheme = make("sac")
    train(scheme, 4)
    workers(scheme)[0].algo._target_vectors["q"].data[0] += 1.0
    with pytest.raises(RanksDifferError, match=r"after update 10 .* GWorker"):
        train(scheme, 12)


def test_changed_parameters_survive_pulling_weights_from_a_rank(make):
    """Check that pulling weights does not reset changed parameters of the algorithm and of the storage.

    The ranks receive the changed parameters with the next step.
    """
    scheme = make("per")
    while scheme.version < 3:
        scheme.step()
    local = scheme.update_worker.local_worker
    local.update_algorithm_parameter("lr", 0.125)
    local.storage.update_storage_parameter("beta", 0.75)
    before, after = local.get_weights().state["q"].copy(), scheme.acting_state()["q"]
    assert not np.array_equal(before, after)  # weights were pulled from a rank
    assert (local.algo.parameters["lr"], local.storage.parameters["beta"]) == (0.125, 0.75)
    scheme.step()
    for worker in workers(scheme):
        assert (worker.algo.parameters["lr"], worker.storage.parameters["beta"]) == (0.125, 0.75)
