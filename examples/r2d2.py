"""Train R2D2: an actor with memory learns from sequences in replay shards, and collectors never wait for the learner.

The first observation of an episode shows one of four cues. Several steps later, the agent must choose the action that
repeats the cue. Without memory, only a quarter of its answers would be right.

    python examples/r2d2.py --num-col-workers 4 --num-replay-workers 2
"""

from __future__ import annotations

import argparse

from pytorchrl import R2D2, Learner, QActor, Scheme, SequenceBuffer, VecEnv

DELAY = 6


def main() -> None:
    args = parse_args()

    task = {"num_cues": 4, "delay": DELAY}
    train_envs = VecEnv.create_factory("pytorchrl/Recall-v0", task, vec_env_size=4)
    test_envs = VecEnv.create_factory("pytorchrl/Recall-v0", task, vec_env_size=5)
    actor = QActor.create_factory(
        train_envs.observation_space, train_envs.action_space, hidden_sizes=(32,), recurrent_net="gru",
        recurrent_size=32)
    algorithm = R2D2.create_factory(
        lr=3e-3, adam_eps=1e-5, gamma=0.97, mini_batch_size=32, start_steps=100 if args.smoke else 1000,
        target_update_interval=25)
    storage = SequenceBuffer.create_factory(
        10_000, rollout_size=DELAY + 1, length=DELAY + 1, burn_in=0, period=DELAY + 1, n_step=3, weight_norm="buffer")

    scheme = Scheme.r2d2(
        algorithm, actor, storage, train_envs, test_envs, num_col_workers=args.num_col_workers,
        num_replay_workers=args.num_replay_workers, max_replay_ratio=8.0, seed=args.seed)

    with Learner(scheme, target_steps=300 if args.smoke else 60_000, log_dir=args.log_dir) as learner:
        learner.train()
        ledger = scheme.ledger()
        if not args.smoke:  # a short trial run skips the evaluation, because its process takes seconds to start
            evaluation = learner.evaluate(num_episodes=200)
            print(f"share of right answers in {len(evaluation.returns)} evaluation episodes: "
                  f"{evaluation.return_mean:.2f}")

    print(f"{learner.env_steps:,} env steps in {learner.seconds:.1f} s, {learner.updates:,} updates")
    print(f"{ledger['resident']:,} steps in replay; each was trained on {ledger['consumed'] / ledger['collected']:.1f} "
          "times")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="R2D2 on a task that needs memory.")
    parser.add_argument("--num-col-workers", type=int, default=2,
                        help="collection workers, each with its own epsilon")
    parser.add_argument("--num-replay-workers", type=int, default=1, help="replay shards; 2 or more are Ray workers")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
