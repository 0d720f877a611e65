"""Test native vector environments whose observations have other dtypes than their spaces declare."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from pytorchrl.agent.env import VecEnv
from pytorchrl.training.training import train


class WrongDtype(VectorEnv):
    """Vector environment that counts steps, and declares counts as float32; episodes have 3 steps.

    Args:
        num_envs: Number of environments.
        dtypes: Dtypes of the counts that `reset` and `step` return.
        mode: The autoreset mode.
        form: Form of an observation: an "array", an "image" (H, W, C), or a "dict" with a second leaf of the declared
            dtype.
        action_space: Action space of one environment.
    """

    def __init__(self, num_envs, dtypes, mode=AutoresetMode.SAME_STEP, form="array", action_space=None):
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": mode}
        self._shape = (16, 17, 3) if form == "image" else (2,)
        space = spaces.Box(0, 1, self._shape, np.float32)
        self.single_observation_space = (
            spaces.Dict({"count": space, "other": spaces.Discrete(4)}) if form == "dict" else space)
        self.single_action_space = action_space or spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._dtypes, self._form, self._count = dtypes, form, 0

    def reset(self, *, seed=None, options=None):
        self._count = 0
        return self._observe(self._dtypes[0]), {}

    def step(self, actions):
        info, mode = {}, self.metadata["autoreset_mode"]
        self._count += 1
        ended = np.full(self.num_envs, self._count == 3)
        observations = self._observe(self._dtypes[1])
        if ended.any() and mode is AutoresetMode.SAME_STEP:
            info = {"final_obs": observations}
        if self._count == (4 if mode is AutoresetMode.NEXT_STEP else 3) and mode is not AutoresetMode.DISABLED:
            observations, _ = self.reset()
        return observations, np.ones(self.num_envs), np.zeros(self.num_envs, bool), ended, info

    def _observe(self, dtype):
        counts = np.full((self.num_envs, *self._shape), self._count, dtype)
        return {"count": counts, "other": counts[:, 0].astype(np.int64)} if self._form == "dict" else counts


@pytest.mark.every(5)
@pytest.mark.parametrize("form", ["array", "image", "dict"])
@pytest.mark.parametrize("dtypes", [(np.float32, np.float32), (np.float64, np.float64), (np.int64, np.int64),
                                    (np.float32, np.float64), (np.float64, np.float32), (np.uint8, np.float16)])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_observations_of_a_native_vector_have_the_declared_dtype(mode, dtypes, form):
    envs = VecEnv.create_factory(WrongDtype, {"dtypes": dtypes, "mode": mode, "form": form}, 2)(seed=0)
    name = "count" if form == "dict" else "obs"
    observations = [envs.reset()[0]]
    steps = [envs.step(np.zeros(2, np.int64)) for _ in range(6)]
    observations += [step.obs for step in steps]
    last = [step.final_obs for step in steps if len(step.final_index)]
    assert {leaves[name].dtype for leaves in observations + last} == {np.dtype(np.float32)}
    assert [float(leaves[name][1].max()) for leaves in observations] == (
        [0, 1, 2, 3, 0, 1, 2] if mode is AutoresetMode.NEXT_STEP else [0, 1, 2, 0, 1, 2, 0])
    ends = 0 if mode is AutoresetMode.NEXT_STEP else 2
    assert [(leaves[name].shape, (leaves[name] == 3).all()) for leaves in last] == [
        ((2, *envs.observation_space[name].shape), True)] * ends


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("algorithm", ["ppo", "sac", "dqn"])
def test_agents_train_on_observations_with_another_dtype(algorithm, dtype):
    options = {"num_steps": 8, "num_mini_batch": 2, "target_steps": 16} if algorithm == "ppo" else {
        "start_steps": 16, "mini_batch_size": 8, "target_steps": 40}
    kwargs = {"dtypes": (dtype, dtype)}
    if algorithm != "dqn":
        kwargs["action_space"] = spaces.Box(-1, 1, (1,), np.float32)
    agent = train(algorithm, WrongDtype, env_kwargs=kwargs, num_envs=2, hidden_sizes=(8,), progress=False,
                  tensorboard=False, seed=3, **options)
    assert agent.summary["updates"] >= 1
