"""Train PPO on the images of an Atari game, with a custom network that is small enough for a CPU.

This example needs the extra `atari`: `pip install -e '.[atari]'` in the source folder.

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
    """Network of two convolutional layers and one linear layer.

    An actor passes the observation space to the constructor, and reads the attribute `out_features`.
    """

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
        """Map images of shape (B, 4, 84, 84) and type uint8 to features of shape (B, 256)."""
        # The channels-last layout is faster on a CPU, and dividing the weights by 255 is cheaper than dividing all
        # pixels.
        x = pictures.contiguous(memory_format=torch.channels_last).float()
        x = torch.relu_(F.conv2d(x, self.conv1.weight / 255, self.conv1.bias, self.conv1.stride))
        x = torch.relu_(self.conv2(x))
        return torch.relu_(self.head(x.flatten(1)))


def main() -> None:
    args = parse_args()
    num_envs, num_steps = (4, 16) if args.smoke else (16, 64)
    target_steps = 128 if args.smoke else args.target_steps

    # `atari_factory` applies the usual preprocessing. In training, each reward is replaced by its sign, and an episode
    # ends at each lost life. Evaluations use raw rewards and whole games.
    train_envs = atari_factory(args.game, num_envs)
    test_envs = atari_factory(args.game, 2 if args.smoke else 5)
    actor = OnPolicyActor.create_factory(
        train_envs.observation_space, train_envs.action_space, feature_extractor=SmallCNN)
    algorithm = PPO.create_factory(
        lr=linear(5e-4, 2e-5), clip_param=0.1, entropy_coef=0.01, num_epochs=3, num_mini_batch=4)
    storage = GAEBuffer.create_factory(size=num_steps)

    # One thread collects while another thread learns from the previous rollout. This uses two cores. The policy lag is
    # 12 to 24 updates, because each rollout is used for 3 x 4 updates.
    scheme = Scheme(
        algorithm, actor, storage, train_envs, test_envs,
        col_communication="asynchronous", queue_size=1, col_in_flight=1, seed=args.seed)

    # Evaluations run on a separate worker while training continues.
    evaluations = {} if args.smoke else {"eval_every": 500_000, "eval_episodes": 5}
    with Learner(
        scheme, target_steps, args.log_dir, **evaluations,
    ) as learner:
        learner.train()
        if not args.smoke:  # a complete game takes thousands of steps
            evaluation = learner.evaluate(num_episodes=30)
            print(f"mean score of {len(evaluation.returns)} games: {evaluation.return_mean:.1f}")

    print(f"{learner.env_steps:,} env steps ({4 * learner.env_steps:,} frames) in {learner.seconds:.1f} s")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO on an Atari game.")
    parser.add_argument("--game", default="ALE/Pong-v5", help="gymnasium id of the game")
    parser.add_argument("--target-steps", type=int, default=4_000_000, help="env steps, each of four frames")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
