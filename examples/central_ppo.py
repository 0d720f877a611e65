"""Train PPO in one process: create the four parts of an agent, a scheme with default options, and a learner.

    python examples/central_ppo.py
    python examples/central_ppo.py --env Acrobot-v1 --log-dir runs/acrobot
"""

from __future__ import annotations

import argparse

from pytorchrl import PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv, linear


def main() -> None:
    args = parse_args()

    # Environments: a vector of 8 for training, and a vector of 5 for evaluation.
    train_envs = VecEnv.create_factory(args.env, vec_env_size=8)
    test_envs = VecEnv.create_factory(args.env, vec_env_size=5)

    # The agent: one factory per part. The options are checked here; workers build the parts later.
    actor = OnPolicyActor.create_factory(
        train_envs.observation_space, train_envs.action_space, hidden_sizes=(64, 64))
    algorithm = PPO.create_factory(
        lr=linear(1e-3, 0.0), gamma=0.98, num_epochs=10, num_mini_batch=4, clip_param=0.2, entropy_coef=0.0)
    storage = GAEBuffer.create_factory(size=128, gae_lambda=0.9)

    # The scheme decides where each operation runs. By default, collection and learning take turns in this process.
    scheme = Scheme(algorithm, actor, storage, train_envs, test_envs, seed=args.seed)

    with Learner(scheme, target_steps=500 if args.smoke else 300_000, log_dir=args.log_dir) as learner:
        learner.train()
        evaluation = learner.evaluate(num_episodes=5 if args.smoke else 100)

    print(f"{learner.env_steps:,} env steps in {learner.seconds:.1f} s, {learner.updates:,} updates")
    print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO in one process.")
    parser.add_argument("--env", default="CartPole-v1", help="gymnasium id of an environment with vector observations")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
