"""Train PPO with synchronous collection workers on Ray: each round is collected with the latest weights.

The agent is the same as in `central_ppo.py`; `num_col_workers` is the only setting of the scheme that differs.

    python examples/parallel_sync_ppo.py --num-col-workers 4
"""

from __future__ import annotations

import argparse

from pytorchrl import PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv, linear


def main() -> None:
    args = parse_args()

    # Each worker has its own vector of environments, so a round has num_col_workers x 4 x 128 steps.
    train_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=4)
    test_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=5)
    actor = OnPolicyActor.create_factory(train_envs.observation_space, train_envs.action_space)
    algorithm = PPO.create_factory(
        lr=linear(1e-3, 0.0), gamma=0.98, num_epochs=10, num_mini_batch=4, entropy_coef=0.0)
    storage = GAEBuffer.create_factory(size=128, gae_lambda=0.9)

    # With 2 or more workers, collection is parallel. The scheme starts Ray before its first remote worker, and shuts
    # Ray down when the scheme is stopped.
    scheme = Scheme(
        algorithm, actor, storage, train_envs, test_envs, num_col_workers=args.num_col_workers, seed=args.seed)

    with Learner(scheme, target_steps=500 if args.smoke else 300_000, log_dir=args.log_dir) as learner:
        learner.train()
        evaluation = learner.evaluate(num_episodes=5 if args.smoke else 100)
        metrics = learner.get_metrics()

    print(f"{learner.env_steps:,} env steps in {learner.seconds:.1f} s, {learner.updates:,} updates")
    print(f"policy lag: {metrics['policy_lag']['max']} at most, because all workers wait for each other")
    print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO with synchronous collection workers.")
    parser.add_argument("--num-col-workers", type=int, default=2, help="collection workers on Ray, 2 or more")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
