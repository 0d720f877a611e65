"""Train CartPole with IMPALA: collectors never wait, and the learner corrects its targets for the age of its data.

The policy that collected a rollout is several updates older than the learner's policy; this number of updates is the
policy lag. V-trace corrects targets for the difference between the two policies. A shorter queue or `--max-policy-lag`
limits the lag.

    python examples/impala.py --num-col-workers 4
"""

from __future__ import annotations

import argparse

from pytorchrl import IMPALA, Learner, OnPolicyActor, Scheme, VecEnv, VTraceBuffer, linear


def main() -> None:
    args = parse_args()

    train_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
    test_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=5)
    actor = OnPolicyActor.create_factory(train_envs.observation_space, train_envs.action_space)
    algorithm = IMPALA.create_factory(lr=linear(2e-3, 0.0), gamma=0.98, entropy_coef=0.0)
    storage = VTraceBuffer.create_factory(size=16)

    # A train batch of 256 steps consists of two rollouts.
    scheme = Scheme.impala(
        algorithm, actor, storage, train_envs, test_envs, num_col_workers=args.num_col_workers, train_batch_size=256,
        queue_size=args.queue_size, col_in_flight=1, max_policy_lag=args.max_policy_lag, seed=args.seed)

    with Learner(scheme, target_steps=500 if args.smoke else 300_000, log_dir=args.log_dir) as learner:
        learner.train()
        # The learner thread continues to train during the evaluation, so the metrics are read before it.
        metrics = learner.get_metrics()
        if not args.smoke:  # the worker that evaluates takes seconds to start
            evaluation = learner.evaluate(num_episodes=100)
            print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.1f}")

    lag, ledger = metrics["policy_lag"], metrics["ledger"]
    print(f"{metrics['env_steps']:,} env steps in {metrics['seconds']:.1f} s, {metrics['updates']:,} updates")
    print(f"policy lag in updates: mean {lag['mean']:.1f}, median {lag['p50']}, largest {lag['max']}")
    print(f"batches that waited for the learner: {metrics['scheme']['queue']['mean']:.1f} on average")
    print(f"of {ledger['collected']:,} steps collected, {ledger['consumed_unique']:,} were used, "
          f"{ledger['dropped']['policy_lag']:,} too old")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="IMPALA: asynchronous collectors, one learner, V-trace.")
    parser.add_argument("--num-col-workers", type=int, default=2,
                        help="collection workers: 1 is a thread of this process, 2 or more are Ray workers")
    parser.add_argument("--queue-size", type=int, default=4, help="train batches that may wait for the learner")
    parser.add_argument("--max-policy-lag", type=int, default=None,
                        help="policy lag, in updates, above which data are dropped")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
