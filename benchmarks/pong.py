"""Train Pong with APPO, IMPALA or Ape-X, and report each evaluation with its env steps and minutes of training.

    python benchmarks/pong.py appo|impala|apex [--target-steps N] [--until 15] [--seed 1] [--log-dir DIR]

Each scheme has one learner, and two collection workers on Ray. Each collection worker plays 8 games. The network is the
small network of `examples/atari_ppo.py`.

- `appo`: rollouts of 64 steps per game, train batches of 1024 steps, 3 epochs with 4 minibatches.
- `impala`: rollouts of 20 steps per game, train batches of 160 steps, each used twice. Advantages are not normalized
  and are small in a game with few rewards, so the entropy bonus must be smaller than for PPO. The weight of the value
  loss is the default: with a fifth of the default, the agent learns nothing in a million steps.
- `apex`: prioritized replay in two shards, three-step targets, each step used 8 to 12 times.

The script shows its progress on stderr, prints one JSON object, and asserts nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from ray import cloudpickle

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import atari_ppo
from results import print_result

from pytorchrl import APPO, DQN, IMPALA, Learner, OnPolicyActor, PERBuffer, QActor, Scheme, VTraceBuffer, linear
from pytorchrl.envs import atari_factory

cloudpickle.register_pickle_by_value(atari_ppo)  # Ray's workers cannot import this module
GAME = "ALE/Pong-v5"
# The learning rates of APPO and IMPALA decay over these numbers of env steps.
TARGET_STEPS = {"appo": 4_000_000, "impala": 6_000_000, "apex": 240_000}
EVAL_EVERY = {"appo": 250_000, "impala": 250_000, "apex": 50_000}


def make_scheme(system: str, seed: int) -> Scheme:
    """Return the scheme of `appo`, `impala` or `apex`."""
    train, test = atari_factory(GAME, 8), atari_factory(GAME, 5)
    workers: dict[str, Any] = {"num_col_workers": 2, "seed": seed}
    if system == "apex":
        actor = QActor.create_factory(
            train.observation_space, train.action_space, feature_extractor=atari_ppo.SmallCNN, hidden_sizes=(256,),
            dueling=True)
        algorithm = DQN.create_factory(
            lr=2.5e-4, start_steps=5_000, mini_batch_size=32, target_update_interval=1000, epsilon_per_worker=True,
            max_grad_norm=10.0)
        storage = PERBuffer.create_factory(200_000, rollout_size=10, n_step=3, stacked_frames=4, weight_norm="buffer")
        return Scheme.apex(algorithm, actor, storage, train, test, num_replay_workers=2, min_replay_ratio=8.0,
                           max_replay_ratio=12.0, max_weight_sync_delay=400, **workers)
    policy = OnPolicyActor.create_factory(train.observation_space, train.action_space,
                                          feature_extractor=atari_ppo.SmallCNN)
    if system == "appo":
        return Scheme.appo(
            APPO.create_factory(lr=linear(5e-4, 2e-5), clip_param=0.1, entropy_coef=0.01, num_epochs=3,
                                num_mini_batch=4), policy,
            VTraceBuffer.create_factory(size=64), train, test, train_batch_size=1024, queue_size=1, col_in_flight=1,
            **workers)
    return Scheme.impala(
        IMPALA.create_factory(lr=linear(5e-4, 2e-5), entropy_coef=0.002, max_grad_norm=0.5), policy,
        VTraceBuffer.create_factory(size=20), train, test, train_batch_size=160, num_passes=2, queue_size=2,
        col_in_flight=1, **workers)


def main() -> None:
    """Parse the command line, train, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=sorted(EVAL_EVERY), help="architecture to train")
    parser.add_argument("--target-steps", type=int, default=None,
                        help=f"env steps, each of four frames (default: {TARGET_STEPS})")
    parser.add_argument("--until", type=float, default=None,
                        help="stop once the last 100 games of training have this mean score")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random numbers")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    options = parser.parse_args()
    target_steps = TARGET_STEPS[options.system] if options.target_steps is None else options.target_steps
    scheme, curve, start = make_scheme(options.system, options.seed), [], time.perf_counter()
    with Learner(scheme, target_steps, options.log_dir, eval_every=EVAL_EVERY[options.system],
                 eval_episodes=5) as learner:
        looked = start
        while not learner.done():
            learner.step()
            if time.perf_counter() - looked < 5.0:
                continue
            looked, metrics = time.perf_counter(), learner.get_metrics()
            evaluation = metrics.get("evaluation")
            if evaluation is not None and (not curve or curve[-1]["version"] != evaluation["version"]):
                curve.append({"version": evaluation["version"], "env_steps": learner.env_steps,
                              "score": evaluation["return_mean"],
                              "training_score": metrics["return_mean"], "minutes": (looked - start) / 60})
                print(curve[-1], file=sys.stderr, flush=True)
            if options.until is not None and (metrics["return_mean"] or -21.0) >= options.until:
                break
        steps, updates = learner.env_steps, learner.get_metrics()["updates"]
        final = learner.evaluate(30)
    print_result({"task": "pong", "system": options.system, "seed": options.seed, "env_steps": steps,
                  "updates": updates, "minutes": (time.perf_counter() - start) / 60, "curve": curve,
                  "score": final.return_mean, "score_std": final.return_std})


if __name__ == "__main__":
    main()
