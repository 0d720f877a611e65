"""Train CartPole with DD-PPO: gradient workers average their gradients and apply the same update, without a server.

Each gradient worker collects by itself, or has its own collection workers. Once a fraction of all collectors
(`--fraction`) has finished its rollouts, the other collectors stop early, and their partial rollouts are used. A slow
environment therefore does not delay the other workers.

    python examples/ddppo.py --num-grad-workers 4
"""

from __future__ import annotations

import argparse

from pytorchrl import PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv, linear


def main() -> None:
    args = parse_args()

    train_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=4)
    test_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=5)
    actor = OnPolicyActor.create_factory(train_envs.observation_space, train_envs.action_space)
    algorithm = PPO.create_factory(lr=linear(1e-3, 0.0), gamma=0.98, num_epochs=8, num_mini_batch=4, entropy_coef=0.0)
    storage = GAEBuffer.create_factory(size=64, gae_lambda=0.9)

    scheme = Scheme.ddppo(
        algorithm, actor, storage, train_envs, test_envs, num_grad_workers=args.num_grad_workers,
        num_col_workers=args.num_col_workers, col_fraction_workers=args.fraction, fraction_samples=0.25, seed=args.seed)

    with Learner(scheme, target_steps=500 if args.smoke else 150_000, log_dir=args.log_dir) as learner:
        learner.train()
        evaluation = learner.evaluate(num_episodes=5 if args.smoke else 100)
        metrics = learner.get_metrics()["scheme"]

    print(f"{learner.env_steps:,} env steps in {learner.seconds:.1f} s, {learner.updates:,} updates")
    print(f"{metrics['rollouts']:,} rollouts, of which {metrics['rollouts_preempted']:,} were cut short")
    print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO with decentralized gradient workers (DD-PPO).")
    parser.add_argument("--num-grad-workers", type=int, default=2, help="gradient workers on Ray, 2 or more")
    parser.add_argument("--num-col-workers", type=int, default=1,
                        help="collection workers of each gradient worker; 1: it collects by itself")
    parser.add_argument("--fraction", type=float, default=0.5,
                        help="share of the collectors that must finish before the others stop")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
