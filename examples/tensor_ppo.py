"""Train PPO in an environment written in torch: a reach task for many arms, which are stepped at once on a device.

    python examples/tensor_ppo.py
    python examples/tensor_ppo.py --num-envs 4096 --device cuda:0
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

import pytorchrl as prl
from pytorchrl.envs.tensors.base import TensorEnv


class Reach(TensorEnv):
    """Turn the two joints of an arm until its tip is at a point. State: two angles, and the point in polar form."""

    single_observation_space = spaces.Box(-2.0, 2.0, (6,), np.float32)
    single_action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    num_draws = 4

    def start(self, draws: Tensor) -> Tensor:
        shoulder, elbow, direction = (2.0 * math.pi * draws[:, :3] - math.pi).unbind(1)
        return torch.stack((shoulder, elbow, direction, 0.5 + 1.4 * draws[:, 3]), 1)

    def dynamics(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angles = state[:, :2] + 0.2 * actions.clamp(-1.0, 1.0)
        state = torch.cat((angles, state[:, 2:]), 1)
        observed = self.observe(state)
        return state, -observed[:, 4:].norm(dim=1), torch.zeros_like(state[:, 0], dtype=torch.bool)

    def observe(self, state: Tensor) -> Tensor:
        shoulder, elbow, direction, distance = state.unbind(1)
        x = distance * direction.cos() - shoulder.cos() - (shoulder + elbow).cos()
        y = distance * direction.sin() - shoulder.sin() - (shoulder + elbow).sin()
        # The last two numbers are the way from the tip to the point; their bounds are those of the lengths of the arm.
        return torch.stack((shoulder.cos(), shoulder.sin(), elbow.cos(), elbow.sin(), x / 2.0, y / 2.0), 1)


def main() -> None:
    args = parse_args()
    agent = prl.train(
        "ppo", Reach, env_kwargs={"device": args.device, "max_episode_steps": 50}, device=args.device,
        num_envs=8 if args.smoke else args.num_envs, num_steps=32, gamma=0.95, num_epochs=4, num_mini_batch=8,
        lr=1e-3, entropy_coef=0.0, target_steps=500 if args.smoke else 2_000_000, seed=args.seed, log_dir=args.log_dir,
        progress=False)
    print(f"{agent.summary['env_steps']:,} env steps, {agent.summary['updates']:,} updates")
    print(f"mean return: {agent.evaluate(5 if args.smoke else 100).return_mean:.1f}; of random actions, about -45")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO in an environment of tensors.")
    parser.add_argument("--num-envs", type=int, default=1024, help="number of environments that are stepped at once")
    parser.add_argument("--device", default="cpu", help="device of the environments and of the learner")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
