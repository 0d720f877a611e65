"""Search hyperparameters of PPO on CartPole with Optuna, and train again with the best ones.

Each trial is a run. A trial ends early if its mean return is below the median return of earlier trials after the same
number of env steps. The last run has a new seed, because the best of several trials was partly lucky.

    pip install optuna
    python examples/optuna_search.py --num-trials 50 --log-dir runs/search
"""

from __future__ import annotations

import argparse
from pathlib import Path

import optuna

import pytorchrl as prl
from pytorchrl.callbacks import OptunaPruning


def main() -> None:
    args = parse_args()
    steps, num_steps = (256, 16) if args.smoke else (30_000, 64)
    fixed = {"target_steps": steps, "num_envs": 4, "num_steps": num_steps, "log_every": steps // 8,
             "tensorboard": False}

    def objective(trial: optuna.Trial) -> float:
        """Train with the options of a trial, and return the score."""
        pruning = OptunaPruning(trial)
        agent = prl.train(
            "ppo", "CartPole-v1", **fixed, callbacks=[pruning], progress=False, seed=args.seed,
            log_dir=None if args.log_dir is None else Path(args.log_dir, "trials", str(trial.number)),
            lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True),
            num_epochs=trial.suggest_int("num_epochs", 1, 10),
            entropy_coef=trial.suggest_float("entropy_coef", 1e-4, 3e-2, log=True))
        pruning.raise_if_pruned()
        return agent.return_mean

    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=args.seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=steps // 4))
    study.optimize(objective, n_trials=args.num_trials)

    best = prl.train("ppo", "CartPole-v1", **fixed, **study.best_params, seed=args.seed + 1, log_dir=args.log_dir)
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"{len(study.trials)} trials, of which {pruned} ended early; best options: {study.best_params}")
    print(f"mean return of the best trial: {study.best_value:.1f}; with a new seed, after "
          f"{best.summary['env_steps']:,} env steps: {best.return_mean:.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Search hyperparameters with Optuna.")
    parser.add_argument("--num-trials", type=int, default=10, help="number of trials")
    parser.add_argument("--seed", type=int, default=1, help="seed of the search and of all trials")
    parser.add_argument("--log-dir", default=None, help="directory of the last run; its folder trials has the others")
    parser.add_argument("--smoke", action="store_true", help="train for a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
