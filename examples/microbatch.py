"""Train PPO with updates that use more steps than fit in one backward pass: batches are split into microbatches.

Each update uses `train_batch_size` steps, and each backward pass at most `microbatch_size` of them. Advantages are
normalized over each microbatch. (To normalize them over the whole batch, all its steps would have to be in memory.)

    python examples/microbatch.py --train-batch-size 8000 --microbatch-size 500
    python examples/microbatch.py --num-col-workers 2
"""

from __future__ import annotations

import argparse

from pytorchrl import PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv, linear


def main() -> None:
    args = parse_args()

    train_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
    test_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=5)
    actor = OnPolicyActor.create_factory(train_envs.observation_space, train_envs.action_space)
    # With one epoch and one minibatch, each step is used only once.
    algorithm = PPO.create_factory(lr=linear(1e-2, 0.0), gamma=0.98, num_epochs=1, num_mini_batch=1, entropy_coef=0.0)
    storage = GAEBuffer.create_factory(size=64, gae_lambda=0.9)

    scheme = Scheme(
        algorithm, actor, storage, train_envs, test_envs, num_col_workers=args.num_col_workers,
        train_batch_size=args.train_batch_size, microbatch_size=args.microbatch_size, norm_over="microbatch",
        seed=args.seed)

    with Learner(scheme, target_steps=500 if args.smoke else 400_000, log_dir=args.log_dir) as learner:
        learner.train()
        evaluation = learner.evaluate(num_episodes=5 if args.smoke else 100)
        passes = learner.get_metrics()["scheme"]["backward_passes"]

    print(f"{learner.env_steps:,} env steps in {learner.seconds:.1f} s, {learner.updates:,} updates of "
          f"{learner.env_steps / learner.updates:,.0f} steps, each from {passes / learner.updates:.1f} backward passes")
    print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO with batches that are collected and processed in microbatches.")
    parser.add_argument("--train-batch-size", type=int, default=2_000, help="env steps per update")
    parser.add_argument("--microbatch-size", type=int, default=500, help="most env steps per backward pass")
    parser.add_argument("--num-col-workers", type=int, default=1,
                        help="collection workers; 2 or more run on Ray and collect while gradients are computed")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
