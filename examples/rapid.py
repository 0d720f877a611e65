"""Train CartPole with Rapid: several learners average their gradients among themselves, while collection continues.

Each learner has its own collection workers, and applies the averaged gradients itself, as in DD-PPO. As in IMPALA, the
data are several updates old, so the algorithm must correct for the policy lag.

    python examples/rapid.py --num-grad-workers 2 --num-col-workers 4
"""

from __future__ import annotations

import argparse

from pytorchrl import APPO, Learner, OnPolicyActor, Scheme, VecEnv, VTraceBuffer, linear


def main() -> None:
    args = parse_args()

    train_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
    test_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=5)
    actor = OnPolicyActor.create_factory(train_envs.observation_space, train_envs.action_space)
    algorithm = APPO.create_factory(lr=linear(1e-3, 0.0), gamma=0.98, num_epochs=4, num_mini_batch=4, entropy_coef=0.0)
    storage = VTraceBuffer.create_factory(size=64, vtrace_lambda=0.9)

    scheme = Scheme.rapid(
        algorithm, actor, storage, train_envs, test_envs, num_grad_workers=args.num_grad_workers,
        num_col_workers=args.num_col_workers, queue_size=1, col_in_flight=1,
        distribute_gradients=not args.central, seed=args.seed)

    with Learner(scheme, target_steps=500 if args.smoke else 200_000, log_dir=args.log_dir) as learner:
        learner.train()
        evaluation = learner.evaluate(num_episodes=5 if args.smoke else 100)
        lag = learner.get_metrics()["policy_lag"]

    print(f"{learner.env_steps:,} env steps in {learner.seconds:.1f} s, {learner.updates:,} updates")
    print(f"policy lag in updates: mean {lag['mean']:.1f}, median {lag['p50']}, largest {lag['max']}")
    print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="APPO with decentralized learners and asynchronous collectors "
                                                 "(Rapid).")
    parser.add_argument("--num-grad-workers", type=int, default=2, help="learners on Ray, 2 or more")
    parser.add_argument("--num-col-workers", type=int, default=1,
                        help="collection workers of each learner: 1 is a thread of it, 2 or more are Ray workers")
    parser.add_argument("--central", action="store_true",
                        help="apply updates in this process instead of in each learner")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
