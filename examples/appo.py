"""Train CartPole with APPO: IMPALA with PPO's clipped loss, so that each batch can be used for several updates.

`--slow-policy` turns APPO into IMPACT, which can use older data: the clipped ratio compares the policy with an earlier
copy of itself, which is refreshed periodically, instead of the policy that collected the data.

    python examples/appo.py --num-col-workers 4
"""

from __future__ import annotations

import argparse

from pytorchrl import APPO, Learner, OnPolicyActor, Scheme, VecEnv, VTraceBuffer, linear


def main() -> None:
    args = parse_args()

    train_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
    test_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=5)
    actor = OnPolicyActor.create_factory(train_envs.observation_space, train_envs.action_space)
    algorithm = APPO.create_factory(
        lr=linear(1e-3, 0.0), gamma=0.98, num_epochs=args.num_epochs, num_mini_batch=4, entropy_coef=0.0,
        target_network=args.slow_policy)
    storage = VTraceBuffer.create_factory(size=64, vtrace_lambda=0.9)

    # Each batch is used for `num_epochs` x 4 updates, and each update increases the policy lag of queued batches.
    # Therefore, the queue is short.
    scheme = Scheme.appo(
        algorithm, actor, storage, train_envs, test_envs, num_col_workers=args.num_col_workers, train_batch_size=512,
        queue_size=1, col_in_flight=1, seed=args.seed)

    with Learner(scheme, target_steps=500 if args.smoke else 150_000, log_dir=args.log_dir) as learner:
        learner.train()
        # The learner thread continues to train during the evaluation, so the metrics are read before it.
        metrics = learner.get_metrics()
        if not args.smoke:  # an evaluation is too slow for a test: its process takes seconds to start
            evaluation = learner.evaluate(num_episodes=100)
            print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.1f}")

    lag = metrics["policy_lag"]
    print(f"{metrics['env_steps']:,} env steps in {metrics['seconds']:.1f} s, {metrics['updates']:,} updates")
    print(f"policy lag in updates: mean {lag['mean']:.1f}, median {lag['p50']}, largest {lag['max']}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="APPO: asynchronous collectors, one learner, PPO's clipped loss.")
    parser.add_argument("--num-col-workers", type=int, default=2,
                        help="collection workers: 1 is a thread of this process, 2 or more are Ray workers")
    parser.add_argument("--num-epochs", type=int, default=4, help="passes over each batch")
    parser.add_argument("--slow-policy", action="store_true",
                        help="clip around a slowly updated copy of the policy (IMPACT)")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
