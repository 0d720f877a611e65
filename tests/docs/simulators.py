"""Small modules in place of simulators that are not installed, so that the code on the pages runs.

Each has the names that the pages use, and environments with the results of the simulator: random walks with two
actions, in torch.
"""

from __future__ import annotations

import importlib.util

# The environments: `Walks` has the five results of Isaac Lab, `Dones` the four of rsl_rl.
_WALKS = '''
import gymnasium as gym
import numpy as np
import torch


class Walks(gym.Env):
    """Random walks that are cut off after 20 steps; the first observation of the next episode replaces the last one."""

    single_observation_space = gym.spaces.Dict({"policy": gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)})
    single_action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, num_envs):
        self.num_envs, self.num_actions, self.device = num_envs, 2, torch.device("cpu")
        self.observation_space, self.action_space = self.single_observation_space, self.single_action_space
        self.state = torch.zeros(num_envs, 3)
        self.episode_length_buf = torch.arange(num_envs) % 20

    def reset(self, *, seed=None, options=None):
        self.state = torch.zeros(self.num_envs, 3)
        return self.get_observations(), {}

    def step(self, actions):
        self.state = self.state + 0.1 * torch.nn.functional.pad(actions.clamp(-1.0, 1.0), (0, 1))
        self.episode_length_buf += 1
        reward, cut = -self.state.abs().sum(1), self.episode_length_buf >= 20
        self.last, self.state = self.state, torch.where(cut.unsqueeze(1), 0.0, self.state)
        self.episode_length_buf[cut] = 0
        return self.get_observations(), reward, torch.zeros_like(cut), cut, {"log": {"a": torch.zeros(())}}

    def get_observations(self):
        return {"policy": self.state.clone()}


class Dones:
    def __init__(self, env):
        self.env, self.num_envs, self.num_actions, self.device = env, env.num_envs, env.num_actions, env.device

    def reset(self):
        return self.env.reset()

    def get_observations(self):
        return self.env.get_observations()

    def step(self, actions):
        obs, reward, terminated, cut, extras = self.env.step(actions)
        return obs, reward, (terminated | cut).long(), {**extras, "time_outs": cut}
'''
_MODULES = {
    "isaaclab": {"isaaclab/app.py": "class AppLauncher:\n    def __init__(self, headless):\n        pass\n"},
    "isaaclab_tasks": {
        "isaaclab_tasks/__init__.py": """
import gymnasium as gym
from walks import Walks

gym.register("Isaac-Cartpole-v0", entry_point=lambda cfg: Walks(cfg["num_envs"]), disable_env_checker=True,
             order_enforce=False)
""",
        "isaaclab_tasks/utils.py": "def parse_env_cfg(task, device, num_envs):\n    return {'num_envs': num_envs}\n"},
    "mjlab": {
        "mjlab/__init__.py": "", "mjlab/tasks/__init__.py": "", "mjlab/tasks/registry.py": """
from types import SimpleNamespace


def load_env_cfg(task):
    return SimpleNamespace(scene=SimpleNamespace(num_envs=1))
""",
        "mjlab/envs.py": """
from walks import Walks


def ManagerBasedRlEnv(cfg, device):
    return Walks(cfg.scene.num_envs)
""",
        "mjlab/rl.py": "from walks import Dones as RslRlVecEnvWrapper\n"},
    "genesis": {"genesis.py": "cpu = 'cpu'\n\n\ndef init(backend):\n    pass\n"},
    "go2_env": {"go2_env.py": """
from walks import Dones, Walks


class Go2Env(Dones):
    def __init__(self, num_envs, env_cfg, obs_cfg, reward_cfg, command_cfg):
        super().__init__(Walks(num_envs))
"""},
    "go2_train": {"go2_train.py": "def get_cfgs():\n    return {}, {}, {}, {}\n"},
    "mani_skill": {
        "mani_skill/__init__.py": "", "mani_skill/vector/__init__.py": "", "mani_skill/vector/wrappers/__init__.py": "",
        "mani_skill/envs.py": """
import gymnasium as gym
from walks import Walks

gym.register("PushCube-v1", entry_point=lambda num_envs, obs_mode: Walks(num_envs), disable_env_checker=True,
             order_enforce=False)
""",
        "mani_skill/vector/wrappers/gymnasium.py": """
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class ManiSkillVectorEnv(VectorEnv):
    def __init__(self, env):
        self.base, self.num_envs = env.unwrapped, env.unwrapped.num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = self.base.single_observation_space["policy"]
        self.single_action_space = self.base.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.device = self.base.device

    def reset(self, *, seed=None, options=None):
        return self.base.reset()[0]["policy"], {}

    def step(self, actions):
        obs, reward, terminated, cut, extras = self.base.step(actions)
        if cut.any():
            extras["final_observation"], extras["_final_observation"] = self.base.last, cut
        return obs["policy"], reward, terminated, cut, extras
"""},
    "mjbatch": {"mjbatch.py": """
import mujoco
import numpy as np


class Batch:
    def __init__(self, model, num_sims):
        self.model, self.data = model, [mujoco.MjData(model) for _ in range(num_sims)]
        self.bound = {}

    def bind(self, name):
        self.bound[name] = np.array([getattr(data, name) for data in self.data])
        return self.bound[name]

    def step(self):
        for row, data in enumerate(self.data):
            for name, values in self.bound.items():
                getattr(data, name)[:] = values[row]
            mujoco.mj_step(self.model, data)
            self._read(row)

    def reset(self, ids=None):
        for row, data in enumerate(self.data):
            if ids is None or ids[row]:
                mujoco.mj_resetData(self.model, data)
                self._read(row)

    def _read(self, row):
        for name, values in self.bound.items():
            values[row] = getattr(self.data[row], name)
"""},
}


def stand_ins():
    """Return name of a file -> content, for all modules that are not installed."""
    missing = [files for name, files in _MODULES.items() if importlib.util.find_spec(name) is None]
    return {"walks.py": _WALKS} | {name: content for files in missing for name, content in files.items()}
