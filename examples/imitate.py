"""Clone the behavior of an expert: train PPO on CartPole, record its episodes, and imitate them with plain torch.

The data set is a file with the observations and actions of the expert. The imitator is an actor of the same kind with
new weights, which maximizes the probability of the recorded actions and sees no rewards.

    python examples/imitate.py --episodes 20
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import pytorchrl as prl
from pytorchrl.play.dataset import Dataset, read_dataset, record_dataset


def main() -> None:
    args = parse_args()
    expert = prl.train("ppo", "CartPole-v1", target_steps=500 if args.smoke else 50_000, num_envs=8,
                       log_dir=args.log_dir, seed=args.seed, progress=False)
    print(f"expert: {expert.summary['env_steps']:,} env steps")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.log_dir or folder) / "expert.npz"
        record_dataset(expert, path, num_episodes=2 if args.smoke else args.episodes)
        data = read_dataset(path)
    print(f"data set: {len(data.lengths)} episodes, {len(data.rewards):,} steps, mean return {data.returns.mean():.1f}")

    num_episodes = 5 if args.smoke else 100
    for num_epochs in (0, 2 if args.smoke else args.epochs):
        imitator = clone(expert, data, num_epochs)
        returns = imitator.evaluate(num_episodes)
        print(f"imitator after {num_epochs} epochs: mean return {returns.return_mean:.1f}")
    print(f"expert: mean return {expert.evaluate(num_episodes).return_mean:.1f}")


def clone(expert: prl.TrainedAgent, data: Dataset, num_epochs: int) -> prl.TrainedAgent:
    """Return an agent with new weights that was trained to choose the recorded actions."""
    actor = expert.agent.actor_factory(device="cpu", seed=expert.seed + 1)
    algorithm = expert.agent.algo_factory(device="cpu", actor=actor, seed=expert.seed)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    observations, actions = torch.as_tensor(data.observations["obs"]), torch.as_tensor(data.actions)
    for epoch in range(num_epochs):
        shuffle = torch.Generator().manual_seed(expert.seed + epoch)
        for rows in torch.randperm(len(actions), generator=shuffle).split(64):
            log_probs = actor.evaluate_actions({"obs": observations[rows]}, {}, None, actions[rows])[0]
            optimizer.zero_grad()
            (-log_probs.mean()).backward()
            optimizer.step()
    return prl.TrainedAgent(agent=expert.agent, acting_state=algorithm.acting_state(), seed=expert.seed)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Behavior cloning from a data set of an expert.")
    parser.add_argument("--episodes", type=int, default=20, help="episodes in the data set")
    parser.add_argument("--epochs", type=int, default=10, help="passes of the imitator over the data set")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics, model and data set; without it nothing "
                        "is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
