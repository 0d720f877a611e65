"""Train CartPole with Ape-X: asynchronous collectors fill a prioritized replay buffer, and a learner samples from it.

Each collector explores with its own probability. `--max-replay-ratio` limits how often each step is used. Without the
limit, a learner that is faster than the collectors would train on the same few steps again and again.

    python examples/apex.py --num-col-workers 4 --num-replay-workers 2
"""

from __future__ import annotations

import argparse

from pytorchrl import DQN, Learner, PERBuffer, QActor, Scheme, VecEnv


def main() -> None:
    args = parse_args()

    train_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=4)
    test_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=5)
    actor = QActor.create_factory(
        train_envs.observation_space, train_envs.action_space, hidden_sizes=(120, 84), dueling=True)
    algorithm = DQN.create_factory(
        lr=1e-3, start_steps=100 if args.smoke else 1_000, mini_batch_size=64, polyak=0.99, target_update_interval=1,
        epsilon_per_worker=True)
    # Importance weights are divided by their maximum over all shards, so that batches from several shards can be mixed.
    storage = PERBuffer.create_factory(50_000, rollout_size=16, n_step=3, weight_norm="buffer")

    scheme = Scheme.apex(
        algorithm, actor, storage, train_envs, test_envs, num_col_workers=args.num_col_workers,
        num_replay_workers=args.num_replay_workers, max_replay_ratio=args.max_replay_ratio, max_weight_sync_delay=128,
        seed=args.seed)

    with Learner(scheme, target_steps=300 if args.smoke else 60_000, log_dir=args.log_dir) as learner:
        learner.train()
        # The learner thread continues to train during the evaluation, so the metrics are read before it.
        metrics = learner.get_metrics()
        if not args.smoke:  # the process of the evaluation takes seconds to start, and training continues meanwhile
            evaluation = learner.evaluate(num_episodes=100)
            print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.1f}")

    ledger = metrics["ledger"]
    print(f"{metrics['env_steps']:,} env steps in {metrics['seconds']:.1f} s, {metrics['updates']:,} updates")
    print(f"{ledger['resident']:,} steps in replay, {ledger['evicted']:,} evicted; each was used "
          f"{ledger['consumed'] / (ledger['resident'] + ledger['evicted']):.1f} times on average")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ape-X: replay shards between asynchronous collectors and one "
                                                 "learner.")
    parser.add_argument("--num-col-workers", type=int, default=2,
                        help="collection workers: 1 is a thread of this process, 2 or more are Ray workers")
    parser.add_argument("--num-replay-workers", type=int, default=1,
                        help="replay shards: 1 is a thread of this process, 2 or more are Ray workers")
    parser.add_argument("--max-replay-ratio", type=float, default=16.0, help="largest number of uses per step")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
