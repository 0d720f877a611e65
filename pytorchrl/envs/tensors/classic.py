"""The tasks of classic control in torch. Their dynamics are those of Gymnasium, rounded to float32."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from pytorchrl.envs.tensors.base import TensorEnv


def _box(*high: float, low: tuple[float, ...] | None = None) -> spaces.Box:
    """Return a space of vectors with these bounds; if `low` is None, the lower bounds are `-high`."""
    upper = np.array(high, np.float32)
    return spaces.Box(-upper if low is None else np.array(low, np.float32), upper, dtype=np.float32)


class TorchCartPole(TensorEnv):
    """Balance a pole on a cart, as in Gymnasium's CartPole. State: position, speed, angle, angular speed."""

    single_observation_space = _box(4.8, np.inf, math.radians(24), np.inf)
    single_action_space = spaces.Discrete(2)
    num_draws = 4

    @override
    def start(self, draws: Tensor) -> Tensor:
        return 0.1 * draws - 0.05

    @override
    def dynamics(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, speed, angle, angular_speed = state.unbind(1)
        cos, sin = angle.cos(), angle.sin()
        force = torch.where(actions == 1, 10.0, -10.0)
        push = (force + 0.05 * angular_speed.square() * sin) / 1.1
        angular_acceleration = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos.square() / 1.1))
        acceleration = push - 0.05 * angular_acceleration * cos / 1.1
        state = state + 0.02 * torch.stack((speed, acceleration, angular_speed, angular_acceleration), 1)
        terminated = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > math.radians(12))
        return state, torch.ones_like(speed), terminated


class TorchPendulum(TensorEnv):
    """Swing a pendulum up, as in Gymnasium's Pendulum. State: angle, angular speed."""

    single_observation_space = _box(1.0, 1.0, 8.0)
    single_action_space = _box(2.0)
    num_draws = 2

    @override
    def start(self, draws: Tensor) -> Tensor:
        angle, speed = (2.0 * draws - 1.0).unbind(1)
        return torch.stack((math.pi * angle, speed), 1)

    @override
    def dynamics(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angle, speed = state.unbind(1)
        torque = actions[:, 0].clamp(-2.0, 2.0)
        from_top = (angle + math.pi).remainder(2.0 * math.pi) - math.pi
        cost = from_top.square() + 0.1 * speed.square() + 0.001 * torque.square()
        speed = (speed + (15.0 * angle.sin() + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
        return torch.stack((angle + 0.05 * speed, speed), 1), -cost, torch.zeros_like(speed, dtype=torch.bool)

    @override
    def observe(self, state: Tensor) -> Tensor:
        angle, speed = state.unbind(1)
        return torch.stack((angle.cos(), angle.sin(), speed), 1)


class TorchAcrobot(TensorEnv):
    """Swing two linked rods up, as in Gymnasium's Acrobot. State: the two angles, the two angular speeds."""

    single_observation_space = _box(1.0, 1.0, 1.0, 1.0, 4.0 * math.pi, 9.0 * math.pi)
    single_action_space = spaces.Discrete(3)
    num_draws = 4

    @override
    def start(self, draws: Tensor) -> Tensor:
        return 0.2 * draws - 0.1

    @override
    def dynamics(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torque = actions - 1.0
        rate_1 = self._rates(state, torque)  # one step of the Runge-Kutta method of order 4
        rate_2 = self._rates(state + 0.1 * rate_1, torque)
        rate_3 = self._rates(state + 0.1 * rate_2, torque)
        rate_4 = self._rates(state + 0.2 * rate_3, torque)
        state = state + 0.2 / 6.0 * (rate_1 + 2.0 * rate_2 + 2.0 * rate_3 + rate_4)
        angles = state[:, :2]
        turned = (angles + math.pi).remainder(2.0 * math.pi) - math.pi
        angles = torch.where(angles.abs() > math.pi, turned, angles)
        first, second = angles.unbind(1)
        speeds = (state[:, 2].clamp(-4.0 * math.pi, 4.0 * math.pi), state[:, 3].clamp(-9.0 * math.pi, 9.0 * math.pi))
        terminated = -first.cos() - (first + second).cos() > 1.0
        return torch.stack((first, second, *speeds), 1), -(~terminated).to(state.dtype), terminated

    @override
    def observe(self, state: Tensor) -> Tensor:
        first, second, speed_1, speed_2 = state.unbind(1)
        return torch.stack((first.cos(), first.sin(), second.cos(), second.sin(), speed_1, speed_2), 1)

    def _rates(self, state: Tensor, torque: Tensor) -> Tensor:
        """Return the derivatives of the state with respect to time; the rods have the length and the mass 1."""
        angle_1, angle_2, speed_1, speed_2 = state.unbind(1)
        cos, sin = angle_2.cos(), angle_2.sin()
        d1, d2 = 3.5 + cos, 1.25 + 0.5 * cos
        phi2 = 4.9 * (angle_1 + angle_2 - math.pi / 2.0).cos()
        phi1 = (-0.5 * speed_2.square() * sin - speed_2 * speed_1 * sin
                + 14.7 * (angle_1 - math.pi / 2.0).cos() + phi2)
        acceleration_2 = ((torque + d2 / d1 * phi1 - 0.5 * speed_1.square() * sin - phi2)
                          / (1.25 - d2.square() / d1))
        return torch.stack((speed_1, speed_2, -(d2 * acceleration_2 + phi1) / d1, acceleration_2), 1)


class _Valley(TensorEnv):
    """Drive a weak car up a hill. State: position, speed."""

    single_observation_space = _box(0.6, 0.07, low=(-1.2, -0.07))
    num_draws = 1

    @override
    def start(self, draws: Tensor) -> Tensor:
        position = 0.2 * draws - 0.6
        return torch.cat((position, torch.zeros_like(position)), 1)

    def roll(self, state: Tensor, acceleration: Tensor) -> Tensor:
        """Return the states after a step; the left end of the valley stops a car."""
        position, speed = state.unbind(1)
        speed = (speed + acceleration - 0.0025 * (3.0 * position).cos()).clamp(-0.07, 0.07)
        position = (position + speed).clamp(-1.2, 0.6)
        return torch.stack((position, torch.where(position == -1.2, speed.clamp(min=0.0), speed)), 1)


class TorchMountainCar(_Valley):
    """Drive a weak car up a hill, as in Gymnasium's MountainCar."""

    single_action_space = spaces.Discrete(3)

    @override
    def dynamics(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = self.roll(state, 0.001 * (actions - 1.0))
        return state, -torch.ones_like(state[:, 0]), (state[:, 0] >= 0.5) & (state[:, 1] >= 0.0)


class TorchMountainCarContinuous(_Valley):
    """Drive a weak car up a hill, as in Gymnasium's MountainCarContinuous."""

    single_action_space = _box(1.0)

    @override
    def dynamics(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = self.roll(state, 0.0015 * actions[:, 0].clamp(-1.0, 1.0))
        terminated = (state[:, 0] >= 0.45) & (state[:, 1] >= 0.0)
        return state, 100.0 * terminated - 0.1 * actions[:, 0].square(), terminated
