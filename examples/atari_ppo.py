"""PPO on an Atari game from pictures, with a network of our own that is small enough for a CPU.

Needs the extra `atari`: `pip install -e '.[atari]'` in the source folder.

    python examples/atari_ppo.py --log-dir runs/pong
    python examples/atari_ppo.py --game ALE/Breakout-v5
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from pytorchrl import PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, linear
from pytorchrl.envs import atari_factory


class SmallCNN(nn.Module):
    """Two convolutions and one linear layer: an actor calls it with the space, and reads `out_features`."""

    out_features = 256

    def __init__(self, space: Any) -> None:
        super().__init__()
        channels, height, width = space.shape
        self.conv1 = nn.Conv2d(channels, 16, kernel_size=8, stride=4)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=4, stride=2)
        rows, columns = (((size - 8) // 4 + 1 - 4) // 2 + 1 for size in (height, width))
        self.head = nn.Linear(32 * rows * columns, self.out_features)
        for layer in (self.conv1, self.conv2, self.head):
            nn.init.orthogonal_(layer.weight, 2**0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, pictures: Tensor) -> Tensor:
        """(B, 4, 84, 84) uint8 -> (B, 256)."""
        # Channels last is the faster layout on a CPU, and dividing the weight by 255 is cheaper than every pixel.
        x = pictures.contiguous(memory_format=torch.channels_last).float()
        x = torch.relu_(F.conv2d(x, self.conv1.weight / 255, self.conv1.bias, self.conv1.stride))
        x = torch.relu_(self.conv2(x))
        return torch.relu_(self.head(x.flatten(1)))


def main() -> None:
    args = parse_args()
    num_envs, num_steps = (4, 16) if args.smoke else (16, 64)
    target_steps = 256 if args.smoke else args.target_steps

    # Preprocessing is the usual one. Learners see the sign of rewards and an end at each lost life, tests see neither.
    train_envs = atari_factory(args.game, num_envs)
    test_envs = atari_factory(args.game, 2 if args.smoke else 5)
    actor = OnPolicyActor.create_factory(
        train_envs.observation_space, train_envs.action_space, feature_extractor=SmallCNN)
    algorithm = PPO.create_factory(
        lr=linear(5e-4, 2e-5), clip_param=0.1, entropy_coef=0.01, num_epochs=3, num_mini_batch=4)
    storage = GAEBuffer.create_factory(size=num_steps)

    # One thread plays while another learns from the rollout before: two cores are used, at a policy lag of one or two.
    scheme = Scheme(
        algorithm, actor, storage, train_envs, test_envs,
        col_communication="asynchronous", queue_size=1, col_in_flight=1, seed=args.seed)

    # Evaluations run beside training on a worker of their own.
    with Learner(
        scheme, target_steps, args.log_dir, eval_every=None if args.smoke else 500_000, eval_episodes=5,
    ) as learner:
        learner.train()
        if not args.smoke:  # whole games take thousands of steps
            evaluation = learner.evaluate(num_episodes=30)
            print(f"mean score of {len(evaluation.returns)} games: {evaluation.return_mean:.1f}")

    print(f"{learner.env_steps:,} env steps ({4 * learner.env_steps:,} frames) in {learner.seconds:.1f} s")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO on an Atari game.")
    parser.add_argument("--game", default="ALE/Pong-v5", help="gymnasium id of the game")
    parser.add_argument("--target-steps", type=int, default=4_000_000, help="env steps, each of four frames")
    parser.add_argument("--seed", type=int, default=None, help="of everything; without one it is drawn")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without one nothing is kept")
    parser.add_argument("--smoke", action="store_true", help="a few updates only, to see that it runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
