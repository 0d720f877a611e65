"""Learn to flip bits until they match a goal, with hindsight experience replay (Andrychowicz et al. 2017).

    python examples/bit_flipping.py [--bits 8] [--relabel none] [--smoke]

With many bits, random actions almost never reach the goal, so without `relabel` all rewards are equal.
"""

from __future__ import annotations

import argparse
import functools

import gymnasium as gym
import numpy as np

from pytorchrl import train


class BitFlipping(gym.Env):
    """N bits, of which each action flips one; an episode ends at the goal, or after N steps.

    The reward of a step is 0 if the bits equal the goal, and -1 otherwise.
    """

    def __init__(self, num_bits: int = 8) -> None:
        bits = gym.spaces.MultiBinary(num_bits)
        self.observation_space = gym.spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), bits))
        self.action_space = gym.spaces.Discrete(num_bits)
        self.num_bits, self.num_steps = num_bits, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bits, self.goal = self.np_random.integers(0, 2, (2, self.num_bits), dtype=np.int8)
        self.num_steps = 0
        return self.observation(), {}

    def step(self, action):
        self.bits[action] ^= 1
        self.num_steps += 1
        reward = float(self.compute_reward(self.bits, self.goal, {}))
        return self.observation(), reward, reward == 0.0, self.num_steps >= self.num_bits, {}

    @staticmethod
    def compute_reward(achieved_goal, desired_goal, info):
        """Return the rewards for achieved and desired goals, (..., num_bits), as an array (...)."""
        return (achieved_goal == desired_goal).all(-1) - 1.0

    @staticmethod
    def compute_terminated(achieved_goal, desired_goal, info):
        """Return whether episodes end; see `compute_reward`."""
        return (achieved_goal == desired_goal).all(-1)

    def observation(self):
        return {"observation": self.bits.copy(), "achieved_goal": self.bits.copy(), "desired_goal": self.goal.copy()}


def main() -> None:
    args = parse_args()
    hindsight = {} if args.relabel == "none" else {
        "relabel": args.relabel, "goal_terminated": BitFlipping.compute_terminated}
    agent = train(
        "dqn", functools.partial(BitFlipping, args.bits), target_steps=500 if args.smoke else args.steps, num_envs=8,
        num_steps=2, replay_size=100_000, start_steps=100 if args.smoke else 500, update_every=16, num_updates=4,
        mini_batch_size=128, hidden_sizes=(256,), lr=1e-3, gamma=0.98, polyak=0.95, target_update_interval=1,
        initial_epsilon=0.3, final_epsilon=0.05, epsilon_steps=args.steps // 2, seed=args.seed, log_dir=args.log_dir,
        progress=False, **hindsight)
    games = agent.evaluate(10 if args.smoke else 200)
    # The reward of the step that reaches the goal is 0, and that of every other step is -1.
    success = np.mean([value > -length for value, length in zip(games.returns, games.lengths, strict=True)])
    print(f"env steps: {agent.summary['env_steps']:,}  share of goals reached: {success:.2f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Flip bits until they match a goal.")
    parser.add_argument("--bits", type=int, default=8, help="number of bits")
    parser.add_argument("--steps", type=int, default=10_000, help="env steps")
    parser.add_argument("--relabel", choices=("future", "final", "episode", "none"), default="future")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-dir", default=None)
    parser.add_argument("--smoke", action="store_true", help="a short run that only shows that it works")
    return parser.parse_args()


if __name__ == "__main__":
    main()
