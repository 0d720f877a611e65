"""Train PPO with collection workers that wait neither for the learner nor for each other.

Rollouts are therefore several updates old when they are used; this number of updates is their policy lag. Two settings
keep the lag low: a short queue, and only one pending request per worker. At the end, the ledger shows how many of the
collected steps were used.

    python examples/async_collection.py --num-col-workers 4
"""

from __future__ import annotations

import argparse

from pytorchrl import ASYNC, PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv, linear


def main() -> None:
    args = parse_args()

    train_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
    test_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=5)
    actor = OnPolicyActor.create_factory(train_envs.observation_space, train_envs.action_space)
    # Fewer epochs are used than with synchronous collection, because each update increases the policy lag of queued
    # rollouts.
    algorithm = PPO.create_factory(
        lr=linear(1e-3, 1e-4), gamma=0.98, num_epochs=4, num_mini_batch=4, entropy_coef=0.0)
    storage = GAEBuffer.create_factory(size=128, gae_lambda=0.9)

    scheme = Scheme(
        algorithm, actor, storage, train_envs, test_envs, num_col_workers=args.num_col_workers,
        col_communication=ASYNC, queue_size=1, col_in_flight=1, seed=args.seed)

    with Learner(scheme, target_steps=500 if args.smoke else 400_000, log_dir=args.log_dir) as learner:
        learner.train()
        evaluation = learner.evaluate(num_episodes=5 if args.smoke else 100)
        lag = learner.get_metrics()["policy_lag"]
        ledger = learner.stop()

    print(f"{learner.env_steps:,} env steps in {learner.seconds:.1f} s, {learner.updates:,} updates")
    print(f"policy lag in updates: mean {lag['mean']:.1f}, median {lag['p50']}, largest {lag['max']}")
    print(f"of {ledger['collected']:,} steps collected, {ledger['consumed_unique']:,} were used, and "
          f"{ledger['dropped']['shutdown']:,} were in flight when it stopped")
    print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO with asynchronous collection workers.")
    parser.add_argument("--num-col-workers", type=int, default=2,
                        help="collection workers: 1 is a thread of this process, 2 or more are Ray workers")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
