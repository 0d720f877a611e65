"""Search hyperparameters of PPO on CartPole with Ray Tune, and train again with the best ones.

Ray runs as many trials at a time as there are CPU cores. A scheduler ends trials whose mean return is low. The last run
has a new seed, because the best of several trials was partly lucky.

    pip install 'ray[tune]'
    python examples/tune_search.py --num-trials 50 --log-dir runs/search
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ray import tune
from ray.tune.schedulers import ASHAScheduler

import pytorchrl as prl
from pytorchrl.callbacks import TuneReport


def main() -> None:
    args = parse_args()
    steps, num_steps = (256, 16) if args.smoke else (30_000, 64)
    fixed = {"target_steps": steps, "num_envs": 4, "num_steps": num_steps, "log_every": steps // 8,
             "tensorboard": False}

    def train_trial(options: dict[str, float]) -> None:
        """Train with the options of a trial; the callback reports its records to Tune."""
        prl.train("ppo", "CartPole-v1", **fixed, **options, seed=args.seed, progress=False, callbacks=[TuneReport()])

    with tempfile.TemporaryDirectory() as folder:
        storage = Path(folder if args.log_dir is None else args.log_dir).resolve()
        tuner = tune.Tuner(
            tune.with_resources(train_trial, {"cpu": 1}),
            param_space={"lr": tune.loguniform(1e-4, 1e-2), "num_epochs": tune.randint(1, 11),
                         "entropy_coef": tune.loguniform(1e-4, 3e-2)},
            tune_config=tune.TuneConfig(
                metric="return_mean", mode="max", num_samples=args.num_trials, reuse_actors=True,
                max_concurrent_trials=1 if args.smoke else None,
                scheduler=ASHAScheduler("env_steps", max_t=steps, grace_period=steps // 4)),
            run_config=tune.RunConfig(name="trials", storage_path=str(storage), verbose=0))
        results = tuner.fit()

    found = results.get_best_result()
    best = prl.train("ppo", "CartPole-v1", **fixed, **found.config, seed=args.seed + 1, log_dir=args.log_dir)
    print(f"{len(results)} trials, {results.num_errors} errors; best options: {found.config}")
    print(f"mean return of the best trial: {found.metrics['return_mean']:.1f}; with a new seed, after "
          f"{best.summary['env_steps']:,} env steps: {best.return_mean:.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Search hyperparameters with Ray Tune.")
    parser.add_argument("--num-trials", type=int, default=4, help="number of trials")
    parser.add_argument("--seed", type=int, default=1, help="seed of all trials")
    parser.add_argument("--log-dir", default=None, help="directory of the last run; its folder trials has the others")
    parser.add_argument("--smoke", action="store_true", help="train for a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
