"""Compare this library with RLlib and Sample Factory on one machine: env steps per second and training returns.

    python benchmarks/peers.py --rllib-python VENV/bin/python --sample-factory-python VENV/bin/python

The tasks are `impala`, `appo` and `dqn` on CartPole-v1, with two collection workers of four environments each;
`SETTINGS` contains the settings that all libraries share. A library is skipped if its interpreter is not given. Each
measurement runs in its own process. In each round, the libraries run one after the other, so that each ratio compares
measurements made within minutes of each other. The measurement of the rate starts after a warm-up, which includes
start-up and compilation. Then the run continues up to the largest budget of env steps, or for `--limit` seconds, and
reports the mean return of the last 100 training episodes at each budget.

The script prints one JSON object and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from typing import Any

from results import print_result

WORKERS, ENVS = 2, 4
SETTINGS: dict[str, dict[str, Any]] = {
    # The settings of RLlib's tuned example for CartPole, except for its networks. A batch has at least 500 steps, in
    # rollouts of 50 x 4 steps.
    "impala": {"rollout": 50, "batch": 500, "lr": 5e-4, "gamma": 0.99, "value_coef": 0.05, "entropy_coef": 0.0,
               "grad_norm": 40.0},
    # The settings of RLlib's tuned example, with rollout and batch sizes that Sample Factory also supports.
    "appo": {"rollout": 128, "batch": 1024, "mini_batch": 256, "epochs": 2, "lr": 7.5e-4, "gamma": 0.99,
             "value_coef": 0.05,
             "entropy_coef": 0.01, "grad_norm": 40.0, "clip": 0.4},
    # The settings of RLlib's tuned example, except for its networks and the random n of its n-step returns. One update
    # is made per 8 env steps.
    "dqn": {"rollout": 16, "batch": 32, "steps_per_update": 8, "lr": 5e-4, "gamma": 0.99, "grad_norm": 40.0,
            "n_step": 3,
            "capacity": 50_000, "alpha": 0.6, "beta": 0.4, "epsilon": (1.0, 0.02, 10_000), "starts": 1000,
            "target_steps": 500},
}
HIDDEN = (64, 64)
WARM_UP = {"impala": 6000, "appo": 12_000, "dqn": 4000}
"""Env steps before the measurement starts."""
SCORES = {"impala": (20_000, 50_000), "appo": (50_000, 100_000), "dqn": (10_000, 20_000)}
"""Env-step budgets after which the mean return is reported."""
_LONGEST_WARM_UP_S = 180.0
SIDES = {"impala": ("ours", "rllib"), "appo": ("ours", "rllib", "sample_factory"), "dqn": ("ours", "rllib")}


class Clock:
    """Measurement of the rate after a warm-up, and of the returns at each budget of env steps."""

    def __init__(self, warm_up: int, seconds: float, budgets: list[int], limit_s: float) -> None:
        self._warm_up, self._seconds, self._budgets, self._limit_s = warm_up, seconds, sorted(budgets), limit_s
        self._first: tuple[float, int, int] | None = None
        self._begun = time.perf_counter()
        self.result: dict[str, Any] = {"returns": {}}

    def tick(self, steps: int, learned: int, return_mean: float) -> bool:
        """Record the collected env steps, the distinct steps used and the mean return; return whether to continue."""
        now = time.perf_counter()
        if self._first is None:
            if steps >= self._warm_up:
                self._first = now, steps, learned
        elif "env_steps_per_s" not in self.result and now - self._first[0] >= self._seconds:
            elapsed = now - self._first[0]
            self.result |= {"env_steps_per_s": (steps - self._first[1]) / elapsed,
                            "learned_per_s": (learned - self._first[2]) / elapsed}
        while self._budgets and steps >= self._budgets[0]:
            self.result["returns"][str(self._budgets.pop(0))] = None if math.isnan(return_mean) else round(return_mean,
                                                                                                           1)
        self.result["end"] = {"env_steps": steps, "return": None if math.isnan(return_mean) else round(return_mean, 1)}
        if self._first is None:
            return now - self._begun < _LONGEST_WARM_UP_S
        if "env_steps_per_s" not in self.result:
            return True
        return bool(self._budgets) and now - self._first[0] < self._limit_s


def ours(task: str, seed: int, clock: Clock) -> dict[str, Any]:
    """Measure this library on Ray."""
    import importlib.metadata

    import gymnasium
    import torch

    import pytorchrl
    from pytorchrl import APPO, ASYNC, DQN, IMPALA, OnPolicyActor, PERBuffer, QActor, Scheme, VecEnv, VTraceBuffer

    s = SETTINGS[task]
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=ENVS)
    spaces = envs.observation_space, envs.action_space
    shared = {"num_col_workers": WORKERS, "seed": seed}
    common = {name: s[name] for name in ("lr", "gamma")} | {"max_grad_norm": s["grad_norm"]}
    if task == "dqn":
        start, end, steps = s["epsilon"]
        scheme = Scheme(
            DQN.create_factory(
                **common, mini_batch_size=s["batch"], update_every=s["steps_per_update"], start_steps=s["starts"],
                initial_epsilon=start, final_epsilon=end, epsilon_steps=steps,
                target_update_interval=s["target_steps"] // s["steps_per_update"]),
            QActor.create_factory(*spaces, hidden_sizes=HIDDEN, activation="tanh", dueling=True),
            PERBuffer.create_factory(s["capacity"], rollout_size=s["rollout"], n_step=s["n_step"], alpha=s["alpha"],
                                     beta=s["beta"]),
            envs, col_communication=ASYNC, queue_size=2, updates_per_step=16, **shared)
    else:
        common |= {"value_loss_coef": s["value_coef"], "entropy_coef": s["entropy_coef"], "compile": True,
                   "adam_eps": 1e-6}
        # The network is the same as Sample Factory's.
        actor = OnPolicyActor.create_factory(*spaces, hidden_sizes=HIDDEN, activation="tanh", policy_gain=1.0)
        storage = VTraceBuffer.create_factory(s["rollout"])
        if task == "impala":
            scheme = Scheme.impala(IMPALA.create_factory(**common), actor, storage, envs, train_batch_size=s["batch"],
                                   queue_size=1, col_in_flight=1, updates_per_step=4, **shared)
        else:
            algo = APPO.create_factory(**common, clip_param=s["clip"], num_epochs=s["epochs"],
                                       advantage_normalization="none",
                                       num_mini_batch=s["batch"] // s["mini_batch"])
            scheme = Scheme.appo(algo, actor, storage, envs, train_batch_size=s["batch"], queue_size=1, col_in_flight=1,
                                 max_policy_lag=4, on_policy_lag="wait", updates_per_step=8, **shared)
    returns: deque[float] = deque(maxlen=100)
    scheme.start(10**6)
    while True:
        scheme.step()
        returns.extend(episode.env_return for episode in scheme.episodes())
        ledger = scheme.ledger()
        learned = ledger["collected"] if task == "dqn" else ledger["consumed_unique"]
        if not clock.tick(ledger["collected"], learned, statistics.fmean(returns) if returns else math.nan):
            break
    metrics = scheme.metrics()
    times, lag, updates = metrics["time_s"], metrics["policy_lag"]["mean"], scheme.version
    scheme.stop()
    return {"updates_per_env_step": updates / ledger["collected"], "policy_lag_mean": lag,
            "time_s": {level: {part: round(seconds, 1) for part, seconds in parts.items()} for level,
                       parts in times.items()},
            "versions": {"pytorchrl": pytorchrl.__version__, "torch": torch.__version__,
                         "ray": importlib.metadata.version("ray"),
                         "gymnasium": gymnasium.__version__}}


def rllib(task: str, seed: int, clock: Clock) -> dict[str, Any]:
    """Measure RLlib's current API stack, with two environment runners and a learner that RLlib places by default."""
    import gymnasium
    import ray
    import torch
    from ray.rllib.algorithms.appo import APPOConfig
    from ray.rllib.algorithms.dqn import DQNConfig
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    # Eight CPUs are declared, so that RLlib's learner, driver and runners share the real cores, as the workers of this
    # library do. Otherwise, RLlib would wait until each of them had its own core.
    ray.init(num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    s = SETTINGS[task]
    network: dict[str, Any] = {"fcnet_hiddens": list(HIDDEN), "fcnet_activation": "tanh"}
    options: dict[str, Any] = {"lr": s["lr"], "gamma": s["gamma"], "grad_clip": s["grad_norm"],
                               "grad_clip_by": "global_norm",
                               "train_batch_size_per_learner": s["batch"]}
    if task == "dqn":
        start, end, steps = s["epsilon"]
        per_round = s["rollout"] * ENVS * WORKERS
        # In each round, RLlib makes `intensity` x (env steps of WORKERS + 1 rollouts) / 32 updates; see its
        # `calculate_rr_weights`. The factor WORKERS / (WORKERS + 1) compensates for the additional rollout.
        intensity = s["batch"] / s["steps_per_update"] * WORKERS / (WORKERS + 1)
        config: Any = DQNConfig()
        options |= {"n_step": s["n_step"], "double_q": True, "dueling": True, "epsilon": [(0, start), (steps, end)],
                    "target_network_update_freq": s["target_steps"], "training_intensity": intensity,
                    "num_steps_sampled_before_learning_starts": s["starts"],
                    "replay_buffer_config": {"type": "PrioritizedEpisodeReplayBuffer", "capacity": s["capacity"],
                                             "alpha": s["alpha"], "beta": s["beta"]}}
        network |= {"head_fcnet_hiddens": []}
        report = {"min_time_s_per_iteration": 0, "min_sample_timesteps_per_iteration": 4 * per_round}
    else:
        config = IMPALAConfig() if task == "impala" else APPOConfig()
        options |= {"vf_loss_coeff": s["value_coef"], "entropy_coeff": s["entropy_coef"]}
        if task == "appo":
            options |= {"num_epochs": s["epochs"], "minibatch_size": s["mini_batch"], "clip_param": s["clip"],
                        "use_circular_buffer": False}
        network |= {"vf_share_layers": False}
        report = {"min_time_s_per_iteration": 1, "min_sample_timesteps_per_iteration": 0}
    algo = (config.environment("CartPole-v1")
            .env_runners(num_env_runners=WORKERS, num_envs_per_env_runner=ENVS, rollout_fragment_length=s["rollout"])
            .training(**options).rl_module(model_config=DefaultModelConfig(**network))
            .reporting(**report).debugging(seed=seed, log_level="ERROR")).build_algo()
    going = True
    while going:
        found = algo.train()
        runners, learner = found.get("env_runners", {}), found.get("learners", {})
        steps = runners.get("num_env_steps_sampled_lifetime", 0)
        # For IMPALA, each step is trained on once, so RLlib's count of trained steps is the number of steps used.
        trained = learner.get("__all_modules__", {}).get("num_env_steps_trained_lifetime", 0)
        learned = trained if task == "impala" else steps
        going = clock.tick(int(steps), int(learned), runners.get("episode_return_mean", math.nan))
    algo.stop()
    return {"versions": {"ray": ray.__version__, "torch": torch.__version__, "gymnasium": gymnasium.__version__}}


def make_sample_factory_env(name: str, config: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """Make an environment with the signature that Sample Factory requires."""
    import gymnasium

    return gymnasium.make("CartPole-v1", render_mode=render_mode)


def sample_factory(task: str, seed: int, clock: Clock) -> dict[str, Any]:
    """Measure Sample Factory's asynchronous PPO with two rollout workers and its default, double-buffered sampling."""
    import importlib.metadata
    import tempfile

    import torch
    from sample_factory.algo.runners.runner import AlgoObserver, Runner
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    s = SETTINGS[task]
    register_env("cartpole", make_sample_factory_env)

    class Watch(AlgoObserver):
        """Observer that checks the clock after each iteration of the runner."""

        def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
            steps, learned = sum(runner.samples_collected), sum(runner.env_steps.values())
            rewards = runner.policy_avg_stats.get("reward", [[]])[0]
            if not clock.tick(steps, learned, statistics.fmean(rewards) if rewards else math.nan):
                runner.cfg.train_for_env_steps = 0  # the runner stops when it checks this option

    with tempfile.TemporaryDirectory() as folder:
        parser, _ = parse_sf_args(argv=[
            "--algo=APPO", "--env=cartpole", "--experiment=peers", f"--train_dir={folder}", f"--seed={seed}",
            "--device=cpu"])
        config = parse_full_cfg(parser, argv=[
            "--algo=APPO", "--env=cartpole", "--experiment=peers", f"--train_dir={folder}", f"--seed={seed}",
            "--device=cpu",
            f"--num_workers={WORKERS}", f"--num_envs_per_worker={ENVS}", f"--rollout={s['rollout']}",
            f"--batch_size={s['mini_batch']}", f"--num_batches_per_epoch={s['batch'] // s['mini_batch']}",
            f"--num_epochs={s['epochs']}", f"--learning_rate={s['lr']}", f"--gamma={s['gamma']}",
            f"--value_loss_coeff={s['value_coef']}", f"--exploration_loss_coeff={s['entropy_coef']}",
            f"--max_grad_norm={s['grad_norm']}", "--gae_lambda=0.95",
            f"--ppo_clip_ratio={s['clip']}", "--use_rnn=False", "--nonlinearity=tanh",
            "--encoder_mlp_layers", *map(str, HIDDEN), "--actor_critic_share_weights=False", "--normalize_input=False",
            "--normalize_returns=False", "--stats_avg=100", "--train_for_env_steps=1000000000",
            "--set_workers_cpu_affinity=False", "--save_every_sec=100000"])
        config, runner = make_runner(config)
        runner.register_observer(Watch())
        runner.init()
        runner.run()
    return {"versions": {"sample_factory": importlib.metadata.version("sample-factory"), "torch": torch.__version__,
                         "gymnasium": importlib.metadata.version("gymnasium")}}


def in_process(python: str, side: str, task: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one measurement in its own process, in which each numerical library uses one thread."""
    budgets = [str(budget) for budget in options.budgets[task]]
    longest = _LONGEST_WARM_UP_S + max(options.seconds, options.limit) + 60.0
    with subprocess.Popen(
            [python, __file__, "_measure", side, task, str(seed), str(options.seconds), str(options.limit), *budgets],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}) as process:
        try:
            out, errors = process.communicate(timeout=longest)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # also kills the workers that the process started
            return {"error": [f"not finished after {longest:.0f} s"]}
    lines = [line for line in out.splitlines() if line.startswith('{"returns"')]
    if process.returncode or not lines:
        return {"error": errors.strip().splitlines()[-3:]}
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def compare(task: str, pythons: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Run each library once per round; return its results, and the ratio of our rate to its rate in each round."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES[task] if side in pythons}
    for number in range(options.pairs):
        for side, found in runs.items():
            found.append(in_process(pythons[side], side, task, number + 1, options))
            print(json.dumps({"task": task, "side": side, **found[-1]}), file=sys.stderr, flush=True)
    result: dict[str, Any] = {}
    for side, found in runs.items():
        rates = [run["env_steps_per_s"] for run in found if "env_steps_per_s" in run]
        ratios = sorted(mine["env_steps_per_s"] / theirs["env_steps_per_s"] for mine,
                        theirs in zip(runs["ours"], found, strict=True)
                        if "env_steps_per_s" in mine and "env_steps_per_s" in theirs)
        returns = {str(budget): [run["returns"][str(budget)] for run in found if run.get("returns",
                                                                                         {}).get(
                                                                                             str(budget)) is not None]
                   for budget in options.budgets[task]}
        result[side] = {
            "env_steps_per_s": round(statistics.median(rates)) if rates else None, "returns_by_budget": returns,
            "runs": found,
            **({} if side == "ours" else {"ours_to_library": [round(ratio, 2) for ratio in ratios],
                                          "ours_to_library_median": round(statistics.median(ratios),
                                                                     2) if ratios else None})}
    return result


def main() -> None:
    """Parse the command line, measure, and print the results."""
    if sys.argv[1:2] == ["_measure"]:
        side, task, seed, seconds, limit = sys.argv[2:7]
        clock = Clock(WARM_UP[task], float(seconds), [int(budget) for budget in sys.argv[7:]], float(limit))
        found = {"ours": ours, "rllib": rllib, "sample_factory": sample_factory}[side](task, int(seed), clock)
        print("\n" + json.dumps(clock.result | found), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rllib-python", help="interpreter with ray[rllib]; without it, RLlib is left out")
    parser.add_argument("--sample-factory-python", help="interpreter with sample-factory; without it, it is left out")
    parser.add_argument("--only", default=",".join(SETTINGS), help="tasks, separated by commas: impala, appo, dqn")
    parser.add_argument("--pairs", type=int, default=3, help="rounds, each with its own seed")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds over which a rate is measured")
    parser.add_argument("--limit", type=float, default=40.0,
                        help="longest time after the warm-up, in seconds")
    parser.add_argument("--scores",
                        help="budgets of env steps, separated by commas, instead of each task's own; 'none' for none")
    options = parser.parse_args()
    given = None if options.scores is None else [] if options.scores == "none" else [int(text)
                                                                                     for text in options.scores.split(
                                                                                         ",")]
    options.budgets = {task: list(budgets) if given is None else given for task, budgets in SCORES.items()}
    pythons = {"ours": sys.executable, "rllib": options.rllib_python, "sample_factory": options.sample_factory_python}
    pythons = {side: python for side, python in pythons.items() if python}
    start = time.perf_counter()
    results = {task: compare(task, pythons, options) for task in options.only.split(",")}
    print_result({"settings": SETTINGS, "workers": WORKERS, "envs_a_worker": ENVS, "hidden": HIDDEN,
                  "seconds": round(time.perf_counter() - start),
                  "unit": "env steps per second", "results": results})


if __name__ == "__main__":
    main()
