"""An agent that tells a `Witness` what its parts do, without changes to the package.

The weights are a mark: the number of updates, a code of all gradients in these updates in their order, and the number
and the sum of the steps in the normalizer. The action of a step is the mark of the weights that chose it, so an
environment knows the weights that acted. The vector of a gradient has two elements for each gradient worker, its share
and its number; those of other workers are 0. A mean therefore contains the share and the number of each gradient in it.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from pytorchrl.agent.data import ActingStep
from pytorchrl.agent.env.vec_env import EnvFactory
from pytorchrl.agent.options import Factory
from pytorchrl.agent.schedules import Ramp
from pytorchrl.agent.synthetic import (
    SyntheticActor,
    SyntheticAlgorithm,
    SyntheticEnvs,
    SyntheticReplay,
    SyntheticStorage,
    synthetic_agent,
)
from pytorchrl.errors import NonFiniteUpdateError
from tests.unit.scheme.witness import NUM_SLOTS, TARGET_STEPS

MODULUS = 2**31
"""Codes and sums are numbers below this one, so that float64 contains them exactly."""


class WitnessedEnvs(SyntheticEnvs):
    """Environments whose actions are marks of weights."""

    witness = None

    def step(self, action):
        step = super().step(action)
        self.witness.step(step.reward, action)
        return step


class WitnessedActor(SyntheticActor):
    """An actor with a normalizer that counts and adds up the numbers of its steps."""

    witness = None

    def __init__(self, options, *, device="cpu", seed=0):
        super().__init__(options, device=device, seed=seed)
        self.seen = torch.zeros(2, dtype=torch.float64)
        self.merged = set()

    def moments_of(self, rollout, returns=None):
        return {"steps": tuple(rollout.reward.reshape(-1).tolist())}

    def merge_moments(self, moments):
        numbers = moments["steps"]
        self.witness.merge(self, numbers)
        self.merged.update(numbers)
        self.seen[0] += len(numbers)
        self.seen[1] = (int(self.seen[1]) + sum(numbers)) % MODULUS


class WitnessedAlgorithm(SyntheticAlgorithm):
    """An algorithm whose weights are a mark, and whose only parameter is the number of env steps before an update."""

    witness = None

    def __init__(self, options, *, actor, seed, device="cpu"):
        super().__init__(options, actor=actor, seed=seed, device=device)
        self.schedules, self.parameters = {"rate": Ramp("linear", 0, TARGET_STEPS, TARGET_STEPS)}, {"rate": 0.0}
        self.count = torch.tensor([0.0, 1.0], dtype=torch.float64)

    @property
    def updates(self):
        """Number of updates that led to the weights, according to the weights themselves."""
        return int(self.count[0])

    @property
    def mark(self):
        return tuple(int(part) for part in (*self.count, *self.actor.seen))

    def acting_state(self):
        return {"count": self.count.clone(), "seen": self.actor.seen.clone()}

    def load_acting_state(self, state):
        for name, tensor in (("count", self.count), ("seen", self.actor.seen)):
            tensor.copy_(torch.as_tensor(state[name]))

    def state_dict(self):
        return {"acting": self.acting_state(), "parameters": dict(self.parameters), "merged": set(self.actor.merged)}

    def load_state_dict(self, state):
        self.load_acting_state(state["acting"])
        self.parameters, self.actor.merged = dict(state["parameters"]), set(state["merged"])

    def follow_schedules(self, env_steps, target_steps):
        values = super().follow_schedules(env_steps, target_steps)
        self.witness.follow(self, env_steps, values["rate"])
        return values

    def acting_step(self, obs, rhs, done, deterministic=False, mask=None):
        action = np.tile(np.array([*self.mark, self.parameters["rate"]]), (len(done), 1))
        return ActingStep(action, action, {}, {})

    def compute_gradients(self, batch):
        number = self.witness.compute(self, batch)
        slot = int(batch.action[0]) >> 52
        vector = torch.zeros(2 * NUM_SLOTS, dtype=torch.float64)
        vector[slot], vector[NUM_SLOTS + slot] = 1.0, number
        self._gradients = [vector]
        return [vector], {"number": float(number)}

    @property
    def gradient_sizes(self):
        return [2 * NUM_SLOTS]

    def apply_gradients(self, gradients=None):
        (vector,) = self.last_gradients() if gradients is None else gradients
        if not all(map(math.isfinite, vector.tolist())):
            self.witness.skip(self)
            raise NonFiniteUpdateError("the gradient is not finite")
        found = [(float(vector[NUM_SLOTS + slot] / vector[slot]), float(vector[slot]))
                 for slot in range(NUM_SLOTS) if vector[slot]]
        self.count[0] += 1
        self.count[1] = (31 * int(self.count[1]) + sum(round(number) for number, _ in found)) % MODULUS
        self.witness.apply(self, found)
        return {}


class _WitnessedStorage:
    """Base class of the witnessed storages of rollouts and of transitions."""

    witness = None

    def __init__(self, options, *, algorithm, **parts):
        super().__init__(options, algorithm=algorithm, **parts)
        self.algorithm = algorithm

    def insert_data_slice(self, rollouts, *sources):
        super().insert_data_slice(rollouts, *sources)
        self.witness.insert(self.algorithm, [rollout.reward.reshape(-1).tolist() for rollout in rollouts])


class WitnessedStorage(_WitnessedStorage, SyntheticStorage):
    """A storage of rollouts."""


class WitnessedReplay(_WitnessedStorage, SyntheticReplay):
    """A storage of transitions."""


def witnessed_agent(witness, **options):
    """Return factories of an agent like `synthetic_agent(**options)`, whose parts report to the witness."""
    algorithm, actor, storage, envs = synthetic_agent(**options)

    def own(cls):
        return type(cls.__name__, (cls,), {"witness": witness})
    storage_class = WitnessedReplay if "capacity" in options else WitnessedStorage
    return (Factory(own(WitnessedAlgorithm), algorithm.options), Factory(own(WitnessedActor), actor.options),
            Factory(own(storage_class), storage.options),
            EnvFactory(own(WitnessedEnvs), envs.options, observation_space={}, action_space=envs.action_space))
