"""Vectors of environments in the forms of several simulators; all have the dynamics of `Walk`."""

from __future__ import annotations

import collections

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

LIMIT = 6


class Walk:
    """Dynamics of N environments: action 1 is a step to the right, for the reward 1; 3 more of them than of action 0
    terminate the episode, and `LIMIT` steps cut it off. Episodes start at a random place.

    Args:
        num_envs: N.
        in_place: Whether all results are returned in the same tensors.
        device: Device of the tensors; None: arrays of NumPy.
    """

    num_actions = 2

    def __init__(self, num_envs=4, *, in_place=False, device="cpu"):
        self.num_envs, self.in_place = num_envs, in_place
        self.device = None if device is None else torch.device(device)
        self.single_observation_space = spaces.Box(-9, 9, (3,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.random = torch.Generator()
        self.place = torch.zeros(num_envs)
        self.steps = torch.zeros(num_envs, dtype=torch.int64)
        self.buffers = {}

    def out(self, name, value):
        """Return a result, in the same memory as before if this is so for all results."""
        if self.in_place:
            kept = self.buffers.setdefault(name, value.clone())
            value = kept.copy_(value)
        return value.numpy() if self.device is None else value

    def seed(self, seed):
        self.random.manual_seed(seed)

    def begin(self, mask=None):
        mask = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        if not mask.any():
            return
        starts = torch.rand(self.num_envs, generator=self.random)
        self.place = torch.where(mask, starts, self.place)
        self.steps = torch.where(mask, torch.zeros_like(self.steps), self.steps)

    def observations(self):
        return torch.stack([self.place, self.steps / LIMIT, torch.ones(self.num_envs)], 1)

    def advance(self, actions):
        """Return rewards, terminations and truncations."""
        if self.device is None:
            assert isinstance(actions, np.ndarray)
            actions = torch.tensor(actions)  # a copy, because arrays of JAX are read-only
        assert isinstance(actions, torch.Tensor)
        assert actions.device.type == "cpu"
        self.place = self.place + 2 * actions - 1
        self.steps = self.steps + 1
        terminated = self.place > 3
        return actions.float(), terminated, (self.steps >= LIMIT) & ~terminated


class FiveResults(Walk):
    """The form of Isaac Lab and mjlab, with the last observations if `has_final`."""

    has_final = True

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.seed(seed)
        self.begin()
        return self.obs("obs"), {}

    def obs(self, name):
        return self.out(name, self.observations())

    def step(self, actions):
        reward, terminated, truncated = self.advance(actions)
        final, extras = self.obs("final"), {}
        if self.has_final:
            extras["final_obs"] = final
        self.begin(terminated | truncated)
        return (self.obs("obs"), self.out("reward", reward), self.out("terminated", terminated),
                self.out("truncated", truncated), extras)


class NoFinal(FiveResults):
    """Native resets without the last observations, as Isaac Lab and mjlab have them."""

    has_final = False


class Groups(FiveResults):
    """Observations in groups, in a mapping that is no dictionary, as a TensorDict is none."""

    def __init__(self, num_envs=4, **options):
        super().__init__(num_envs, **options)
        self.single_observation_space = spaces.Dict({"policy": self.single_observation_space})

    def obs(self, name):
        return collections.UserDict({"policy": super().obs(name)})


class AsEnv(gym.Env):
    """The form in which `gymnasium.make` builds environments of Isaac Lab: an Env that steps several copies."""

    def __init__(self, num_envs=4):
        self.walk = FiveResults(num_envs)
        self.num_envs, self.device = num_envs, self.walk.device
        self.single_observation_space = self.walk.single_observation_space
        self.single_action_space = self.walk.single_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        return self.walk.reset(seed)

    def step(self, actions):
        return self.walk.step(actions)


class FourResults(FiveResults):
    """The form of Genesis: `dones` are integers, and time limits are in the extras."""

    def step(self, actions):
        obs, reward, terminated, truncated, extras = super().step(actions)
        return obs, reward, (terminated | truncated).long(), {**extras, "time_outs": truncated}

    def reset(self):
        return super().reset()[0], None


class RslRl(Groups):
    """The form of rsl_rl: there is no `reset`, and `get_observations` returns groups."""

    reset = None

    def __init__(self, num_envs=4):
        super().__init__(num_envs)
        self.begin()

    def get_observations(self):
        return self.obs("obs")

    def step(self, actions):
        obs, reward, terminated, truncated, extras = super().step(actions)
        return obs, reward, (terminated | truncated).long(), {**extras, "time_outs": truncated}


class TensorVector(VectorEnv):
    """A vector environment of Gymnasium with tensors, in one of the three autoreset modes.

    Args:
        num_envs: Number of environments.
        mode: The mode.
        final: The entry of `info` with the last observations in SAME_STEP mode.
        options: See `Walk`. Results in the same memory are set to zero by a reset.
    """

    def __init__(self, num_envs=4, mode=AutoresetMode.SAME_STEP, final="final_obs", **options):
        self.walk = Walk(num_envs, **options)
        self.num_envs, self.final = num_envs, final
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = self.walk.single_observation_space
        self.single_action_space = self.walk.single_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.ended = torch.zeros(num_envs, dtype=torch.bool)

    def obs(self):
        return self.walk.out("obs", self.walk.observations())

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.walk.seed(seed)
        mask = None if options is None else torch.as_tensor(options["reset_mask"])
        self.walk.begin(mask)
        self.ended[:] = False
        for buffer in self.walk.buffers.values():
            buffer.zero_()
        return self.obs(), {}

    def step(self, actions):
        walk, mode, info = self.walk, self.metadata.get("autoreset_mode"), {}
        reward, terminated, truncated = walk.advance(actions)
        if mode is AutoresetMode.NEXT_STEP:
            again, self.ended = self.ended, terminated | truncated
            walk.begin(again)
            reward, terminated, truncated = reward * ~again, terminated & ~again, truncated & ~again
            self.ended = self.ended & ~again
        elif mode is not AutoresetMode.DISABLED:
            ended = terminated | truncated
            if ended.any():
                info = {self.final: self.obs(), f"_{self.final}": ended}
            walk.begin(ended)
        return (self.obs(), *(walk.out(name, part) for name, part in
                              (("reward", reward), ("terminated", terminated), ("truncated", truncated))), info)


class ManiSkillForm(TensorVector):
    """A vector environment in the form of ManiSkill: it states no mode, but resets at once, with an older name."""

    auto_reset = True

    def __init__(self, num_envs=4):
        super().__init__(num_envs, final="final_observation")
        self.metadata = VectorEnv.metadata
        self.walk.action_space = self.action_space

    @property
    def unwrapped(self):
        return self.walk
