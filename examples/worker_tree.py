"""Train PPO in a worker tree composed by hand, with separate factories for each level.

The first of the two gradient workers has one collection worker, and the second has two. Collection workers collect
while gradients are computed, and wait only if their rollouts would otherwise become more than four updates old. The
tree runs in threads; with `--runtime ray`, each worker has its own process. The page `docs/compose_tree.md` explains
the levels.

    python examples/worker_tree.py --runtime ray
"""

from __future__ import annotations

import argparse

from pytorchrl import ASYNC, PARALLEL, PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv, linear
from pytorchrl.scheme import CWorkerSet, GWorkerSet


def main() -> None:
    args = parse_args()

    train_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=4)
    test_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=5)
    actor = OnPolicyActor.create_factory(train_envs.observation_space, train_envs.action_space)
    algorithm = PPO.create_factory(
        lr=linear(1e-3, 1e-4), gamma=0.98, num_epochs=4, num_mini_batch=4, entropy_coef=0.0)
    storage = GAEBuffer.create_factory(size=128, gae_lambda=0.9)

    # The factory of each level contains the factory of the level below. The first gradient worker has 1 collection
    # worker, and the second has 2.
    collection = CWorkerSet.create_factory((1, 2), algorithm, actor, storage, train_envs)
    gradients = GWorkerSet.create_factory(
        2, collection, col_execution=PARALLEL, col_communication=ASYNC, queue_size=1, col_in_flight=1,
        max_policy_lag=4, on_policy_lag="wait")
    scheme = Scheme.from_factory(
        gradients, grad_execution=PARALLEL, test_envs_factory=test_envs, runtime=args.runtime, seed=args.seed)

    with Learner(scheme, target_steps=500 if args.smoke else 300_000, log_dir=args.log_dir) as learner:
        learner.train()
        evaluation = learner.evaluate(num_episodes=5 if args.smoke else 100)
        ledger = learner.stop()

    print(f"{learner.env_steps:,} env steps in {learner.seconds:.1f} s, {learner.updates:,} updates")
    print(f"of {ledger['collected']:,} steps collected, {ledger['consumed_unique']:,} were used")
    print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO in a worker tree composed by hand.")
    parser.add_argument("--runtime", choices=("threads", "ray", "simulated"), default="threads",
                        help="where the workers run")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
