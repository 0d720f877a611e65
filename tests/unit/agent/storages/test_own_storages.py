"""Test user-defined storages (custom returns, custom sampling, and a new kind of storage), and error messages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import PPO, GAEBuffer, OnPolicyActor, ReplayBuffer, VanillaOnPolicyBuffer
from pytorchrl.agent.algorithms import Algorithm
from pytorchrl.agent.data import Batch, RolloutData, Step
from pytorchrl.agent.options import Options, option
from pytorchrl.agent.storages import Storage
from pytorchrl.errors import ConfigError, ContractError

SPACE = gym.spaces.Box(-1, 1, (3,), np.float32)
DISCOUNT = 0.9


class MonteCarlo(VanillaOnPolicyBuffer):
    """Storage whose returns are discounted sums of rewards, without bootstrapping from values."""

    def estimate(self, rollout, recompute=False):
        value, _ = self.values_of(rollout, recompute)
        reward, ended = self.rewards_of(rollout), (rollout.terminated | rollout.truncated).numpy()
        returns = np.zeros_like(reward)
        following = np.zeros(rollout.num_envs, np.float32)
        for t in reversed(range(rollout.num_steps)):
            following = returns[t] = reward[t] + self.algorithm.gamma * np.where(ended[t], 0.0, following)
        return returns - value[:-1].numpy(), returns


def parts_of(cls, algorithm=PPO, **options):
    actor = OnPolicyActor.create_factory(SPACE, gym.spaces.Discrete(2), hidden_sizes=(4,))(seed=0)
    algo = algorithm.create_factory(gamma=DISCOUNT)(actor=actor, seed=0)
    return algo, cls.create_factory(7, **options)(actor=actor, algorithm=algo, num_envs=4, seed=0)


def collected(algo, storage, steps):
    storage.start(steps.observe())
    while not storage.full:
        obs, rhs, done, mask = storage.current()
        storage.insert_transition(algo.acting_step(obs, rhs, done, mask=mask), steps.step())
    rollout = storage.get_all_buffer_data()
    algo.finish_rollout(rollout)
    return rollout


@pytest.fixture
def steps():
    """Return a source of random steps of four environments."""
    class Steps:
        rng = np.random.default_rng(0)

        def observe(self):
            return {"obs": self.rng.normal(size=(4, 3)).astype(np.float32)}

        def step(self):
            terminated = self.rng.random(4) < 0.2
            return Step(
                obs=self.observe(), reward=self.rng.normal(size=4).astype(np.float32), terminated=terminated,
                truncated=np.zeros(4, bool), valid=np.ones(4, bool), first=terminated,
                final_index=np.flatnonzero(terminated),
                final_obs={"obs": np.zeros((int(terminated.sum()), 3), np.float32)}, mask=None, episodes=[])
    return Steps()


def test_samples_contain_the_estimates_of_a_subclass(steps):
    algo, storage = parts_of(MonteCarlo)
    rollout = collected(algo, storage, steps)
    storage.insert_data_slice([rollout])
    storage.before_gradients()
    batch, = storage.generate_batches(1)
    expected = {}
    for e in range(4):
        for t in range(7):
            total, factor = 0.0, 1.0
            for later in range(t, 7):
                total += factor * float(rollout.reward[later, e])
                factor *= DISCOUNT
                if rollout.terminated[later, e]:
                    break
            expected[tuple(rollout.obs["obs"][t, e].tolist())] = total, total - float(rollout.other["value"][t, e])
    found = (batch.obs["obs"].tolist(), batch.ret.tolist(), batch.advantage.tolist())
    for obs, ret, advantage in zip(*found, strict=True):
        assert (ret, advantage) == pytest.approx(expected[tuple(obs)], abs=1e-5)
    assert len(expected) == len(batch.ret) == 28


class Recent(ReplayBuffer):
    """Replay that samples only the latest `newest` transitions, in order."""

    @dataclass(frozen=True, kw_only=True)
    class Options(ReplayBuffer.Options):
        newest: int = option(3, help="Number of newest transitions to sample from.", low=1)

    def draw(self, count):
        rows = self.drawable_rows()[-self.options.newest:]
        return np.resize(rows, count), np.ones(count)


@dataclass
class Nothing:
    """Stub that serves as the actor and as the algorithm of a replay storage."""

    gamma = 0.9

    def initial_states(self, num_envs):
        return {}


def replay(cls, size=10, **options):
    return cls.create_factory(size, rollout_size=2, **options)(actor=Nothing(), algorithm=Nothing(), num_envs=1, seed=0)


def rollout_of(numbers, valid=None):
    count = len(numbers)
    no = torch.zeros(count, 1, dtype=torch.bool)
    return RolloutData(
        obs={"obs": torch.tensor([*numbers, numbers[-1] + 1], dtype=torch.float32).view(-1, 1, 1)},
        done=torch.zeros(count + 1, 1, dtype=torch.bool), rhs={}, mask=None,
        action=torch.zeros(count, 1, dtype=torch.int64),
        reward=torch.tensor(numbers, dtype=torch.float32).view(-1, 1), terminated=no, truncated=no,
        valid=~no if valid is None else torch.tensor(valid).view(-1, 1),
        final_index=torch.zeros((0, 2), dtype=torch.int64),
        final_obs={"obs": torch.zeros(0, 1)})


@pytest.mark.parametrize("num_rollouts", [3, 5, 6, 9, 12])
def test_sampleable_rows_are_listed_from_oldest_to_newest(num_rollouts):
    """Check the list of sampleable rows and the sampled rows, with invalid rows and after the ring has wrapped."""
    storage = replay(Recent)
    for number in range(num_rollouts):
        storage.insert_data_slice([rollout_of([2 * number, 2 * number + 1], valid=[True, number % 3 != 1])], ["here"])
    kept = list(range(2 * num_rollouts))[-10:]
    expected = [n for n in kept if n % 2 == 0 or (n // 2) % 3 != 1]
    rows = storage.drawable_rows()
    assert storage._batch(storage.ring, rows, np.ones(len(rows))).obs["obs"].flatten().tolist() == expected
    batch = storage.sample(6)
    assert batch.obs["obs"].flatten().tolist() == expected[-3:] * 2
    assert batch.weight.tolist() == [1.0] * 6


class Plain(Storage):
    """On-policy storage that generates one batch of all steps, in which returns and advantages are the rewards."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Options):
        size: int = option(help="Steps of each environment in a rollout.", low=1)

    held, inserted, drawn = (), 0, 0

    def insert_data_slice(self, rollouts):
        self.held = rollouts
        self.inserted += sum(rollout.num_valid() for rollout in rollouts)

    def generate_batches(self, num_mini_batch, mini_batch_size=None, num_epochs=1):
        def rows(leaf):
            return torch.cat([leaf(rollout)[:rollout.num_steps].flatten(0, 1) for rollout in self.held])

        count = sum(rollout.size for rollout in self.held)
        self.drawn += count
        yield Batch(
            obs={"obs": rows(lambda r: r.obs["obs"])}, done=rows(lambda r: r.done), rhs={}, mask=None,
            action=rows(lambda r: r.action), valid=None, logp=rows(lambda r: r.other["logp"]),
            value=rows(lambda r: r.other["value"]), ret=rows(lambda r: r.reward), advantage=rows(lambda r: r.reward),
            num_samples=count, num_new_samples=count, last=True)

    def reset(self):
        self.held = ()

    @property
    def counters(self):
        return {"inserted": self.inserted, "resident": sum(rollout.size for rollout in self.held),
                "sampled": self.drawn}


def test_a_storage_from_scratch_collects_and_learns(steps):
    algo, storage = parts_of(Plain)
    assert (storage.rollout_size, storage.num_envs, storage.device.type) == (7, 4, "cpu")
    rollout = collected(algo, storage, steps)
    storage.insert_data_slice([rollout])
    storage.before_gradients()
    batch, = algo.batches(storage)
    _, info = algo.compute_gradients(batch)
    assert info["kl"] == pytest.approx(0.0, abs=1e-6)
    assert torch.equal(batch.ret, rollout.reward.flatten())
    state = storage.state_dict()
    storage.generator.manual_seed(99)
    storage.load_state_dict(state)
    assert torch.equal(storage.generator.get_state(), state["generator"])


# Mistakes


def estimating(advantages=lambda array: array, returns=lambda array: array):
    class MyBuffer(GAEBuffer):
        def estimate(self, rollout, recompute=False):
            found = super().estimate(rollout, recompute)
            return advantages(found[0]), returns(found[1])
    return MyBuffer


def batching(change):
    class MyBuffer(Plain):
        def generate_batches(self, *args, **kwargs):
            for batch in super().generate_batches(*args, **kwargs):
                yield change(batch)
    return MyBuffer


def changed(**fields):
    def change(batch):
        return replace(batch, **{name: function(getattr(batch, name)) for name, function in fields.items()})
    return change


def forgetful(names):
    class MyPPO(PPO):
        def finish_rollout(self, rollout):
            super().finish_rollout(rollout)
            for name in names:
                del rollout.other[name]
    return MyPPO


MISTAKES = {
    "float64 returns": (estimating(returns=lambda a: a.astype(np.float64)), PPO,
                        r"MyBuffer.estimate\(\) returned returns as a numpy array of shape \(7, 4\) and dtype "
                        r"float64; expected a "
                        r"numpy array of shape \(7, 4\) and dtype float32"),
    "advantages of another shape": (estimating(advantages=np.transpose), PPO, r"advantages as a numpy array of shape "
                                                                              r"\(4, 7\)"),
    "tensors": (estimating(advantages=torch.from_numpy), PPO, "advantages as a tensor"),
    "no pair": (type("MyBuffer", (GAEBuffer,), {"estimate": lambda self, rollout, recompute=False: None}), PPO,
                r"MyBuffer.estimate\(\) returned None; expected advantages and returns"),
    "float64 in a batch": (batching(changed(ret=torch.Tensor.double)), PPO,
                           r"MyBuffer.generate_batches\(\) returned 'ret' as a tensor of shape \(28,\) and dtype "
                           r"float64"),
    "a column": (batching(changed(advantage=lambda leaf: leaf[:, None])), PPO, r"'advantage' as a tensor of shape "
                                                                               r"\(28, 1\)"),
    "no count": (batching(changed(num_samples=lambda count: 0)), PPO, "a batch with num_samples=0"),
    "a batch alone": (type("MyBuffer", (GAEBuffer,), {"generate_batches": lambda self, *args, **kwargs: next(
        GAEBuffer.generate_batches(self, *args, **kwargs))}), PPO, "returned a Batch; expected an iterator of Batch"),
    "no batch": (batching(lambda batch: {"obs": batch.obs}), PPO, "returned a dict; expected an iterator of Batch"),
    "a rollout that was not finished": (GAEBuffer, forgetful(["logp"]), r"MyPPO.finish_rollout\(\) returned a rollout "
                                                                        r".*logp in it, too"),
    "no values": (GAEBuffer, forgetful(["value", "final_value"]), "value, final_value in it, too"),
}


@pytest.mark.parametrize(("cls", "algorithm", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_contract_violations_are_reported(steps, cls, algorithm, message):
    algo, storage = parts_of(cls, algorithm)
    storage.insert_data_slice([collected(algo, storage, steps)])

    def learn():
        storage.before_gradients()
        return list(algo.batches(storage))
    with pytest.raises(ContractError, match=message):
        learn()


DRAWS = {
    "rows alone": (np.resize,
                   r"MyReplay.draw\(\) returned a numpy array of shape \(4,\).*; expected rows and weights, two "
                   r"arrays"),
    "too few": (lambda rows, count: (rows[:1], np.ones(1)), r"MyReplay.draw\(\) returned rows as a numpy array of "
                                                            r"shape \(1,\)"),
    "no whole numbers": (lambda rows, count: (np.ones(count), np.ones(count)), "of whole numbers"),
    "no weights": (lambda rows, count: (np.resize(rows, count), None), r"MyReplay.draw\(\) returned weights as None"),
    "what is not there": (lambda rows, count: (np.full(count, 7), np.ones(count)), "rows that cannot be drawn"),
    "beyond the end": (lambda rows, count: (np.full(count, 10), np.ones(count)), "rows that cannot be drawn"),
}


@pytest.mark.parametrize(("drawn", "message"), DRAWS.values(), ids=DRAWS.keys())
def test_contract_violations_in_sampling_are_reported(drawn, message):
    storage = replay(type("MyReplay", (ReplayBuffer,),
                          {"draw": lambda self, count: drawn(self.drawable_rows(), count)}))
    storage.insert_data_slice([rollout_of([0, 1])], ["here"])
    with pytest.raises(ContractError, match=message):
        storage.sample(4)


def acts(change):
    class MyPPO(PPO):
        def acting_step(self, *args, **kwargs):
            return change(super().acting_step(*args, **kwargs))
    return MyPPO


@pytest.mark.parametrize(("change", "message"), [
    (lambda step: step._replace(action=step.action[:2]), r"MyPPO.acting_step\(\) returned 'action' as a numpy array "
                                                         r"of shape \(2,\)"),
    (lambda step: step._replace(other={"dist_params": 3.0}), "'dist_params' as 3.0"),
    (lambda step: step.action, r"returned a numpy array .*; expected an ActingStep")])
def test_contract_violations_in_acting_steps_are_reported(steps, change, message):
    algo, storage = parts_of(GAEBuffer, acts(change))
    with pytest.raises(ContractError, match=message):
        collected(algo, storage, steps)


def test_missing_methods_are_reported_before_anything_is_built():
    cls = type("Mine", (Storage,), {"reset": lambda self: None})
    with pytest.raises(ContractError, match="Mine does not define counters, generate_batches, insert_data_slice; "
                                            "define every method that Storage declares abstract"):
        cls.create_factory(3)
    assert not issubclass(ContractError, ConfigError)
    assert issubclass(ContractError, TypeError)
    with pytest.raises(ContractError, match="Mine does not define"):
        type("Mine", (Algorithm,), {}).create_factory()
