"""Build real actors, algorithms and storages, and feed them made-up steps."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import OnPolicyActor
from pytorchrl.agent.algorithms import PPO
from pytorchrl.agent.data import Step
from pytorchrl.agent.storages import GAEBuffer, VTraceBuffer
from pytorchrl.agent.storages.returns import gae

torch.set_num_threads(1)  # small networks are slower with several threads

OBS_SIZE, NUM_ACTIONS = 3, 2


class MadeUpSteps:
    """Source of random observations, rewards and episode ends, in SAME_STEP or NEXT_STEP mode; actions are ignored."""

    def __init__(self, num_envs, seed=0, masked=False, next_step=False):
        self.num_envs, self.masked, self.next_step = num_envs, masked, next_step
        self.rng = np.random.default_rng(seed)
        self.ended = np.zeros(num_envs, bool)

    def observe(self):
        return {"obs": self.rng.normal(size=(self.num_envs, OBS_SIZE)).astype(np.float32)}

    def mask(self):
        if not self.masked:
            return None
        mask = self.rng.random((self.num_envs, NUM_ACTIONS)) < 0.6
        mask[:, 0] |= ~mask.any(1)
        return mask

    def step(self):
        resets = self.ended if self.next_step else np.zeros(self.num_envs, bool)
        kind = self.rng.random(self.num_envs)
        terminated, truncated = (kind < 0.1) & ~resets, (kind > 0.9) & ~resets
        self.ended = terminated | truncated
        finals = np.zeros(0, np.int64) if self.next_step else np.flatnonzero(self.ended)
        return Step(
            obs=self.observe(), reward=np.where(resets, 0, self.rng.normal(size=self.num_envs)).astype(np.float32),
            terminated=terminated, truncated=truncated, valid=~resets, first=resets if self.next_step else self.ended,
            final_index=finals, final_obs={"obs": self.rng.normal(size=(len(finals), OBS_SIZE)).astype(np.float32)},
            mask=self.mask(), episodes=[])


@dataclass
class Parts:
    """The actor, algorithm and storage of one worker."""

    actor: Any
    algorithm: Any
    storage: Any

    @property
    def params(self):
        """The live parameters of the only parameter group, with shape (P,)."""
        return self.algorithm.groups["all"].data

    @property
    def whole_state(self):
        """A copy of every number in the algorithm's state, in a fixed order."""
        def walk(value):
            if isinstance(value, dict):
                return [leaf for key in sorted(value) for leaf in walk(value[key])]
            if isinstance(value, list):  # the state of a schedule is [name, *numbers]
                return [torch.tensor(value[1:]).double()]
            return [] if value is None else [torch.as_tensor(value).double().flatten()]
        return torch.cat(walk(self.algorithm.state_dict()))


def build_parts(cls=PPO, num_envs=4, size=8, actor=None, storage=None, seed=0, action_space=None,
                actor_class=OnPolicyActor, **options):
    """Return the actor, algorithm and storage of one worker."""
    space = gym.spaces.Box(-1, 1, (OBS_SIZE,), np.float32)
    made_actor = actor_class.create_factory(
        space, action_space or gym.spaces.Discrete(NUM_ACTIONS), **{"hidden_sizes": (8,), **(actor or {})})(
            device="cpu", seed=seed)
    algorithm = cls.create_factory(**options)(actor=made_actor, device="cpu", seed=seed)
    kind = GAEBuffer if cls.learns_from is GAEBuffer.provides else VTraceBuffer
    made_storage = kind.create_factory(size=size, **(storage or {}))(
        actor=made_actor, algorithm=algorithm, num_envs=num_envs, device="cpu", seed=seed)
    return Parts(made_actor, algorithm, made_storage)


def collect_rollout(parts, steps, num_steps=None):
    """Return one finished rollout of `num_steps` steps, or a full rollout if `num_steps` is None."""
    storage = parts.storage
    if not hasattr(steps, "is_started"):
        storage.start(steps.observe(), steps.mask())
        steps.is_started = True
    while not storage.full and storage.num_steps != num_steps:
        obs, rhs, done, mask = storage.current()
        storage.insert_transition(parts.algorithm.acting_step(obs, rhs, done, mask=mask), steps.step())
    rollout = storage.get_all_buffer_data()
    parts.algorithm.finish_rollout(rollout)
    return rollout


def learn_from(parts, rollouts):
    """Train on the rollouts, and return the info of each update."""
    storage, algorithm = parts.storage, parts.algorithm
    storage.insert_data_slice(rollouts)
    storage.before_gradients()
    infos = []
    for batch in storage.generate_batches(algorithm.num_mini_batch, num_epochs=algorithm.num_epochs):
        gradients, info = algorithm.compute_gradients(batch)
        infos.append({**info, **algorithm.apply_gradients(gradients)})
    return infos


@pytest.fixture
def build():
    return build_parts


@pytest.fixture
def made_up_steps():
    return MadeUpSteps


@pytest.fixture
def collect():
    return collect_rollout


@pytest.fixture
def learn():
    return learn_from


@pytest.fixture
def traced_only(monkeypatch):
    """Make `torch.compile` trace functions into graphs, whose operations then run as they are, without generated code.

    The trace determines what is constant in a graph and which batches it supports. Generating and compiling the code
    takes several times as long.
    """
    compile_ = torch.compile

    @functools.wraps(compile_)
    def trace(function, *, fullgraph, dynamic, options):
        return compile_(function, fullgraph=fullgraph, dynamic=dynamic, backend="eager",
                        options={"guard_filter_fn": options["guard_filter_fn"]})
    monkeypatch.setattr(torch, "compile", trace)


def train_parts(cls=PPO, rollouts=2, masked=False, next_step=False, num_envs=4, **settings):
    """Train on several rollouts, and return the parts and the info of each update."""
    parts = build_parts(cls, num_envs=num_envs, **settings)
    steps = MadeUpSteps(num_envs, masked=masked, next_step=next_step)
    infos = [info for _ in range(rollouts) for info in learn_from(parts, [collect_rollout(parts, steps)])]
    return parts, infos


@pytest.fixture
def train():
    return train_parts


@pytest.fixture(scope="session")
def plain_params():
    """Return a function that trains like `train` and returns the parameters; it trains once with equal settings."""
    known = {}

    def run(cls=PPO, **settings):
        key = cls, repr(settings)
        if key not in known:
            known[key] = train_parts(cls, **settings)[0].params
        return known[key]
    return run


class ScriptedEpisodes:
    """Source of scripted steps, in SAME_STEP or NEXT_STEP mode.

    `scripts` contains one list per environment. Each entry of the list is the (length, end) of one episode.
    """

    def __init__(self, scripts, next_step):
        self.scripts, self.next_step = scripts, next_step
        self.position = [(0, 0)] * len(scripts)  # (episode, completed steps of the episode)
        self.waits = np.zeros(len(scripts), bool)

    @staticmethod
    def observation(env, episode, step):
        return np.random.default_rng([env, episode, step]).normal(size=OBS_SIZE).astype(np.float32)

    def observe(self):
        return {"obs": np.stack([self.observation(e, *at) for e, at in enumerate(self.position)])}

    def step(self):
        count = len(self.scripts)
        terminated, truncated, first = (np.zeros(count, bool) for _ in range(3))
        valid, reward, finals = ~self.waits, np.zeros(count, np.float32), []
        for e, script in enumerate(self.scripts):
            episode, step = self.position[e]
            length, end = script[episode]
            if self.waits[e]:  # this is the reset step of NEXT_STEP mode
                self.waits[e], first[e], self.position[e] = False, True, (episode + 1, 0)
                continue
            reward[e] = np.cos(7 * e + 3 * episode + step)
            step += 1
            self.position[e] = (episode, step)
            if step == length:
                (terminated if end == "terminated" else truncated)[e] = True
                if self.next_step:
                    self.waits[e] = True
                else:
                    finals.append((e, self.observation(e, episode, step)))
                    first[e], self.position[e] = True, (episode + 1, 0)
        return Step(
            obs=self.observe(), reward=reward, terminated=terminated, truncated=truncated, valid=valid, first=first,
            final_index=np.array([e for e, _ in finals], dtype=np.int64),
            final_obs={"obs": np.array([obs for _, obs in finals], dtype=np.float32).reshape(-1, OBS_SIZE)},
            mask=None, episodes=[])


@pytest.fixture
def play_script():
    """Return a function that plays scripted episodes, and returns the advantages of valid steps in each environment."""
    def run(parts, mode):
        endings = [(3, "terminated"), (4, "truncated"), (2, "truncated"), (3, "terminated")]
        episodes = ScriptedEpisodes(
            [[*endings, (99, "truncated")], [*endings[::-1], (99, "truncated")]], next_step=mode == "next_step")
        storage, algorithm = parts.storage, parts.algorithm
        storage.start(episodes.observe())
        for _ in range(14 + (4 if mode == "next_step" else 0)):
            storage.insert_transition(algorithm.acting_step(*storage.current()[:3]), episodes.step())
        rollout = storage.get_all_buffer_data()
        algorithm.finish_rollout(rollout)
        advantage, _ = gae(
            rollout, rollout.other["value"], rollout.other["final_value"], algorithm.gamma, storage.gae_lambda)
        return advantage.T[rollout.valid.numpy().T]
    return run
