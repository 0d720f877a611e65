"""Train an agent with one call, `train("ppo", "CartPole-v1", lr=1e-3, num_col_workers=2)`, and load a saved agent."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import gymnasium as gym
import torch

from pytorchrl.agent.acting import POLICY, Acting, Chosen, Mask, MemoryState
from pytorchrl.agent.algorithms import Algorithm
from pytorchrl.agent.algorithms.registry import Registration, registration_of
from pytorchrl.agent.data import Evaluation
from pytorchrl.agent.declarations import without_numpy
from pytorchrl.agent.env import EnvFactory
from pytorchrl.agent.env.aliases import Observation
from pytorchrl.agent.env.guard import has_form
from pytorchrl.agent.env.single import is_vector, unwrapped
from pytorchrl.agent.factories import Agent
from pytorchrl.agent.multi.env import MultiAgentEnvFactory
from pytorchrl.agent.option_values.descriptions import mapping
from pytorchrl.agent.option_values.text import items_of, to_python
from pytorchrl.agent.options import build_options
from pytorchrl.agent.policy import Policy
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.seeding import check_seed
from pytorchrl.errors import CheckpointError, ConfigError, Problem, PyTorchRLError, SpaceError, WeightsError
from pytorchrl.files.atomic import read_json
from pytorchrl.files.run_directory import CHECKPOINTS, MODEL_NAME, RESULT_FILE, RUN_FILE, is_directory_of_runs
from pytorchrl.files.tensors import MODEL_FORMAT, acting_tensors_of, check_finite, read_sealed, save
from pytorchrl.learner.checkpoints import RunState, newest_checkpoint, write_checkpoint
from pytorchrl.learner.learner import Learner
from pytorchrl.learner.measurements import unit_of_steps
from pytorchrl.scheme import Scheme
from pytorchrl.scheme.architectures import PRESETS
from pytorchrl.scheme.check import keyword_problems
from pytorchrl.scheme.supervision.evaluation import Evaluator, KeptEnvs
from pytorchrl.scheme.transport.messages import Weights
from pytorchrl.support.code import Code
from pytorchrl.support.display import Displayed, Row, WrittenFile, figure
from pytorchrl.support.numbers import check_whole
from pytorchrl.support.tracebacks import USER_ERRORS, brief_errors, reraise_of_signal
from pytorchrl.support.untyped import MetricsDict, OptionValue
from pytorchrl.training import presets, recipes
from pytorchrl.training.composition import Composition, compose_parts, option_specs, with_code
from pytorchrl.training.configuration import load_config
from pytorchrl.training.presets import EnvSource
from pytorchrl.training.strangers import BoundedTensors

# Options that are not written to `run.json`, because callbacks are code.
_OF_CALLBACKS = ("callbacks", "on_callback_error", "callback_timeout_s")
# The largest size of the model of a run that is not trusted, in bytes.
_LARGEST_MODEL = 4 << 30

if TYPE_CHECKING:
    from pytorchrl.export import Exported, Exporter


def make_learner(algorithm: str | type[Algorithm], env: EnvSource, **options: OptionValue) -> tuple[Learner, Agent]:
    """Return a learner that has not started, and its agent; the options are those of `train`."""
    return learner_of(Training(algorithm, env, options))


@dataclass(frozen=True)
class Training:
    """The arguments of `train`, and the state from which training continues.

    Attributes:
        algorithm: The algorithm.
        env: The environment.
        options: All other arguments of `train`.
        state: The state of an earlier run in memory; None: there is none.
    """

    algorithm: str | type[Algorithm]
    env: EnvSource
    options: Mapping[str, object]
    state: RunState | None = None


def learner_of(training: Training) -> tuple[Learner, Agent]:
    """Return a learner that has not started, and its agent; see `make_learner`."""
    algorithm, env, options = training.algorithm, training.env, training.options
    registration = registration_of(algorithm)
    source, (env, options) = env, with_code(algorithm, env, options)
    composition = compose_parts(registration.algorithm, env, options)
    scheme, agent, learner_options = _checked(composition)
    log_dir = learner_options.get("log_dir")
    recipe = {}
    if log_dir is not None or learner_options.get("callbacks"):  # for `run.json`, and for trackers
        specs = option_specs(registration.algorithm)
        recipe = recipes.describe(registration, source, {
            name: without_numpy(specs[name].hint, value) for name, value in composition.options.items()
            if name not in _OF_CALLBACKS}, training.options)
    run_name = None
    if log_dir is not None and is_directory_of_runs(log_dir):
        run_name = f"{registration.label}-{_name_of(env)}"
    learner = Learner(scheme, recipe=recipe, run_name=run_name, title=_title(registration, source, composition),
                      state=training.state, **learner_options)
    if learner.log_dir is not None:  # unlike `log_dir`, always the directory of a single run
        # Environments write monitor files there. The path is absolute, as workers may have another working directory.
        path = os.path.abspath(os.path.expanduser(learner.log_dir))
        monitored = agent.train_envs_factory.with_options(log_dir=path)
        scheme.agent = replace(scheme.agent, train_envs_factory=monitored)
    return learner, agent


def _name_of(env: EnvSource) -> str:
    if isinstance(env, gym.Env) or is_vector(env):
        return type(unwrapped(env)).__name__
    return env if isinstance(env, str) else getattr(env, "__name__", "env")


def _title(registration: Registration, env: EnvSource, composition: Composition) -> str:
    """Return a line that names the algorithm, the environment, the env steps, the preset and the learning rates."""
    name, options, specs = composition.preset, composition.options, option_specs(registration.algorithm)
    rates = [f"{rate}={to_python(value)}{'' if isinstance(value, Schedule) else ' (constant)'}"
             for rate in ("lr", "lr_q", "lr_pi") if rate in specs
             for value in [options.get(rate, specs[rate].default)]]
    kind = f" ({presets.KINDS[name]})" if name in presets.KINDS else ""
    preset = f"preset {name!r}{kind}" if name else "no preset"
    data = composition.scheme.get("dataset")
    steps = f"{composition.learner['target_steps']:,} {'env steps' if data is None else f'updates from {data}'}"
    shown = str(env) if isinstance(env, Code) else _name_of(env)
    return f"{registration.label} on {shown}: {', '.join([steps, preset, *rates])}"


def _checked(composition: Composition) -> tuple[Scheme, Agent, dict[str, OptionValue]]:
    """Return the scheme, the agent, and the options of the learner.

    Raises:
        ConfigError: Options are wrong or contradict each other; the message lists all problems of all parts.
    """
    problems, agent, scheme = composition.problems, composition.agent, None
    given = dict(composition.scheme)
    architecture = given.pop("preset", None)
    if architecture is not None and architecture not in PRESETS:
        problems.wrong(Problem(f"preset must be one of {list(PRESETS)} or None, got {architecture!r}",
                               options=("preset",)))
        architecture = None
    if agent is None:
        if architecture is not None:
            problems.add(PRESETS[architecture].problems(None, given))
            given = PRESETS[architecture].settings(given)
        problems.add(keyword_problems(given))
    else:
        make = Scheme if architecture is None else getattr(Scheme, architecture)
        try:
            scheme = make(agent.algo_factory, agent.actor_factory, agent.storage_factory, agent.train_envs_factory,
                          agent.test_envs_factory, **given)
        except ConfigError as error:
            problems.catch(error)
    options = problems.build(lambda **own: build_options(Learner, own), composition.learner)
    if options is not None:
        is_recorded = any(given.get(name) is not None for name in ("record", "replay"))
        is_given = agent is not None and agent.test_envs_factory is None
        if agent is not None and is_given and options.eval_every is not None:
            problems.add([Problem(
                "eval_every needs a second environment, but an environment that is given as an object cannot be copied",
                f"{agent.train_envs_factory.options.env_fn.remedy}, or leave eval_every out", ("eval_every",))])
        problems.add(options.problems_with(has_tests=True, is_recorded=is_recorded))
        info_keywords = None if agent is None else getattr(agent.train_envs_factory.options, "info_keywords", None)
        if options.log_dir is None and info_keywords:
            problems.add([Problem("info_keywords needs a log_dir, because it adds columns to the monitor files there",
                                  "give log_dir, or leave info_keywords out", ("info_keywords", "log_dir"))])
    problems.raise_all()
    assert scheme is not None
    assert agent is not None
    return scheme, agent, composition.learner


def named_settings(preset: str) -> dict[str, object]:
    """Return the settings of the architecture called `preset`; empty if no architecture has this name."""
    return {**PRESETS[preset].defaults, **PRESETS[preset].fixed} if preset in PRESETS else {}


@brief_errors
def train(
    algorithm: str | type[Algorithm], env: EnvSource, *, target_steps: int | None = None,
    log_dir: str | os.PathLike[str] | None = None, **options: OptionValue,
) -> TrainedAgent:
    """Train an agent and stop its workers.

        agent = pytorchrl.train("ppo", "CartPole-v1", target_steps=200_000)
        print(agent.return_mean, agent.evaluate(100).return_mean)

    Args:
        algorithm: A name, such as "ppo", or that of a variant, such as "redq"; your own class, registered with
            `@algorithm` or derived from a registered class; or "module:Class".
        env: A gymnasium id, or "module:id" if a module registers the id when it is imported; a class or function that
            makes one environment or, if it takes `num_envs`, an object that steps several at once, or its name
            "module:name"; the name of a module with `parallel_env` (PettingZoo), such as "mpe2.simple_spread_v3", whose
            environments have several agents; or an environment or such an object itself, for a run with one worker
            (`num_envs` is then its number of environments, and nothing is evaluated during training).
        target_steps: Env steps of the whole experiment; None: the number in the preset for this environment.
        log_dir: Directory of this run, or a directory of runs that ends in a slash, such as "runs/": this run gets a
            new directory in it, such as `runs/ppo-CartPole-v1-1`. If it is None, no files are written.
        **options: Any option of the algorithm, storage, actor, environments, scheme or learner, by name, such as `lr`,
            `num_steps`, `hidden_sizes`, `num_envs`, `num_col_workers`, `eval_every` and `seed`. A class or function may
            also be given by its name, "module:name", which is then imported. `policies` assigns
            policies to several agents: "shared", "independent", or a mapping or function from agent to policy. If `env`
            is a class or function, `policies` also declares that its environments have several agents.

    Returns:
        The trained agent, with the run's figures.

    Raises:
        ConfigError: An option is unknown or wrong; nothing has been started.
        PyTorchRLError: Training failed.
    """
    given = {"target_steps": target_steps, "log_dir": log_dir}
    return _train(Training(algorithm, env, {**options, **{k: v for k, v in given.items() if v is not None}}))


def _train(training: Training) -> TrainedAgent:
    """Train an agent, and keep what is needed to train it further."""
    learner, agent = learner_of(training)
    with learner:
        learner.train()
        acting_state = learner.scheme.acting_state()
        state = learner.last_state() if _keeps_state(learner) else None
    # The algorithm of the scheme contains the values that the scheme has chosen for options that were "auto".
    return TrainedAgent(
        agent=replace(agent, algo_factory=learner.scheme.agent.algo_factory), acting_state=acting_state,
        seed=learner.scheme.seed, summary=learner.summary(), log_dir=learner.log_dir,
        training=replace(training, state=state))


def _keeps_state(learner: Learner) -> bool:
    """Return whether the state of a run is kept in memory at its end, because it is at hand and in no checkpoint."""
    scheme = learner.scheme
    is_recorded = not (scheme.settings["record"] is scheme.settings["replay"] is None)
    return not scheme.has_remote_workers and not is_recorded and learner.options.checkpoint_every is None


@brief_errors
def load(
    run_dir: str | os.PathLike[str], *, model: str = MODEL_NAME, algorithm: str | type[Algorithm] | None = None,
    trust: bool = False,
) -> TrainedAgent:
    """Return the agent that `train`, `pytorchrl train` or a `Learner` saved in the directory of a run.

    Args:
        run_dir: Directory of a single run, such as the `log_dir` of a `TrainedAgent` or a `Learner`; `~` is expanded.
        model: Name of the model in that directory, without `.pt`.
        algorithm: Class of the algorithm, or "module:Class", which is then imported. None: the algorithm that the run
            names, which must be in this package or already imported by this process.
        trust: Whether to import, and thereby execute, code that the run names, such as the function that makes its
            environments. If not, only classes that this process has already imported are used, nothing is imported
            from the working directory, and sizes in `run.json` are limited by the size of the model. Set it only for
            runs whose author you trust.

    Raises:
        CheckpointError: There is no run or no such model, the files cannot be read, or the run needs code that is not
            imported.
        ConfigError: `algorithm` is not an algorithm.
    """
    run_dir = Path(run_dir).expanduser()
    path = run_dir / f"{model}.pt"
    name = f"model {str(path)!r}"
    run = recipes.read(run_dir)
    state = acting_tensors_of(read_sealed(path, "model", None if trust else _LARGEST_MODEL), name)
    with contextlib.nullcontext() if trust else BoundedTensors(state):
        agent = recipes.build(run, run_dir, algorithm, trust=trust, model=state)
        try:
            acting = agent.algo_factory(device="cpu", actor=agent.actor_factory(device="cpu", seed=0), seed=0)
        except PyTorchRLError:
            raise
        except USER_ERRORS as error:  # for example, a network of the user reads a file that is missing here
            reraise_of_signal(error)
            # If memory is lacking, torch may append a C++ stack trace to the message. Keep only the first line.
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"the agent that {RUN_FILE} in {str(run_dir)!r} describes cannot be built: "
                                  f"{type(error).__name__}: {reason}") from error
    try:
        acting.load_acting_state(state)
    except WeightsError as error:
        raise CheckpointError(
            f"{str(path)!r} belongs to a different agent than {RUN_FILE} describes: {error}") from error
    check_finite(state, name)
    given = recipes.given_in(run)
    return TrainedAgent(agent=agent, acting_state=state, seed=check_seed(run["seed"]), log_dir=run_dir,
                        given=None if given is None else Training(*given), trust=trust)


class TrainedAgent(Displayed):
    """A trained policy with its test environments. Printing it shows the options that were given to `train`.

    Attributes:
        agent: The factories of the agent.
        acting_state: Tensors that acting needs, by name: parameters and the statistics of normalizers.
        seed: Seed of the experiment.
        summary: Figures of the run, as `pytorchrl train --json` prints them; empty after `load`.
        log_dir: Directory of the run; None if no files were written.
    """

    def __init__(
        self, *, agent: Agent, acting_state: Mapping[str, torch.Tensor], seed: int,
        summary: MetricsDict | None = None, log_dir: Path | None = None, training: Training | None = None,
        given: Training | None = None, trust: bool = False,
    ) -> None:
        self.agent, self.acting_state, self.seed = agent, dict(acting_state), seed
        self.summary, self.log_dir = dict(summary or {}), log_dir
        self._training, self._trust = training, trust
        self._given = training if given is None else given  # as the user gave them, without the options of the preset
        self._exporter: Exporter | None = None

    def _rows(self) -> list[Row]:
        given, summary = self._given, self.summary
        of_policies: dict[str, float] = summary.get("policy_return_means", {})
        return [
            *(self.agent._rows() if given is None else [
                ("algorithm", [getattr(given.algorithm, "__name__", str(given.algorithm))]),
                ("env", [_name_of(given.env)]),
                ("options", items_of({name: value for name, value in given.options.items()
                                      if name not in ("seed", "log_dir")}))]),
            ("seed", [str(self.seed)]),
            ("trained", [f"{summary['env_steps']:,} {unit_of_steps(summary['scheme'])} in {summary['seconds']:.1f} s"]
             if summary else []),
            ("return", [] if self.return_mean is None else [
                f"{figure(self.return_mean)} (mean of the last {summary['return_episodes']} training episodes)"]),
            ("by policy", [f"{policy} {figure(mean)}" for policy, mean in of_policies.items()]),
            ("log_dir", [] if self.log_dir is None else [str(self.log_dir)])]

    @brief_errors
    def plot(
        self, output: str | os.PathLike[str] | None = None, *, x: str = "env_steps", y: str = "return_mean",
    ) -> WrittenFile:
        """Draw the learning curve of the run into a picture, as `pytorchrl plot` does; a notebook shows the picture.

        Args:
            output: Path of the picture; its ending, such as `.png` or `.svg`, chooses the format. None: `curve.png` in
                the directory of the run.
            x: Name of a number in the run's records, for the horizontal axis.
            y: Name of another number in the records, for the vertical axis, such as "algorithm/loss".

        Returns:
            The file, which can be used like a path.

        Raises:
            ConfigError: The agent has no `log_dir`, no record has both numbers, the file cannot be written, or
                matplotlib is missing.
        """
        from pytorchrl.analysis.plotting import Picture, plot_runs  # only here, because few programs need it
        from pytorchrl.analysis.runs import read_run

        run_dir = self._directory("plot")
        path = run_dir / "curve.png" if output is None else Path(output).expanduser()
        plot_runs([run_dir], path, x=x, y=y, picture=Picture(read_run(run_dir).task))
        return WrittenFile(path)

    @brief_errors
    def report(self, output: str | os.PathLike[str] | None = None) -> WrittenFile:
        """Write one HTML page about the run, as `pytorchrl report` does; a notebook shows a link to it.

        Args:
            output: Path of the page. None: `report.html` in the directory of the run.

        Returns:
            The file, which can be used like a path.

        Raises:
            ConfigError: The agent has no `log_dir`, the directory contains no run, or the file cannot be written.
        """
        from pytorchrl.monitor.page import write_report  # only here, because few programs need it
        from pytorchrl.monitor.view import read_run

        run_dir = self._directory("report")
        path = run_dir / "report.html" if output is None else Path(output).expanduser()
        write_report([read_run(run_dir)], path)
        return WrittenFile(path)

    def _directory(self, method: str) -> Path:
        """Return the directory of the run, which `method` reads."""
        if self.log_dir is None:
            raise ConfigError(f"{method} needs the records of the run, but this agent was trained without log_dir, so "
                              'nothing was saved; train it with log_dir="runs/"')
        return self.log_dir

    @property
    def return_mean(self) -> float | None:
        """The mean raw return of the last 100 training episodes; None if no episode has ended, or after `load`."""
        return self.summary.get("return_mean")

    @brief_errors
    def train(self, steps: int) -> TrainedAgent:
        """Train this agent for `steps` more env steps, with the same options, and return it.

        The run continues as with `resume=True` and a `target_steps` that is larger by `steps`: with its optimizers,
        replay and ledger, and in its `log_dir`. Schedules without a number of steps end at the new target. The state of
        the run is in memory or, with `checkpoint_every`, in its last checkpoint.

        Args:
            steps: Number of env steps, at least 1.

        Raises:
            ConfigError: `steps` is not a whole number >= 1, or the state of the run is neither in memory nor in a
                checkpoint.
            PyTorchRLError: Training failed; this agent is as before.
        """
        steps = check_whole("steps", steps)
        training = self._training or self._training_in_directory()
        done = self._steps_in_checkpoint() if training.state is None else training.state.learner["env_steps"]
        options = {**training.options, "target_steps": done + steps}
        if self.log_dir is not None:
            if training.state is not None:
                write_checkpoint(self.log_dir, training.state)
            options |= {"log_dir": self.log_dir, "resume": True, "overwrite": False}
        state = training.state if self.log_dir is None else None
        trained = _train(replace(training, options=options, state=state))
        for name in ("policy", "_acting", "_kept_envs"):
            self.__dict__.pop(name, None)
        self._exporter = None
        self.agent, self.acting_state, self.seed = trained.agent, trained.acting_state, trained.seed
        self.summary, self.log_dir, self._training = trained.summary, trained.log_dir, trained._training
        if self._given is not None:
            self._given = replace(self._given, options={**self._given.options, "target_steps": done + steps})
        return self

    def _steps_in_checkpoint(self) -> int:
        """Return the env steps of the last checkpoint, which must be those of the run."""
        steps = None if self.log_dir is None else newest_checkpoint(self.log_dir / CHECKPOINTS)
        if self.log_dir is None or steps is None:
            raise ConfigError(
                "the state of this agent's training is neither in memory, which is so after a run in one process, nor "
                "in a checkpoint of its run; to train it further, train it with log_dir and checkpoint_every")
        result: Mapping[str, object] = self.summary
        if not result:
            with contextlib.suppress(OSError, ValueError, TypeError):
                result = mapping(read_json(self.log_dir / RESULT_FILE))
        if (end := result.get("env_steps", steps)) != steps:
            raise ConfigError(f"the run in {str(self.log_dir)!r} has ended at {end} env steps, but its newest "
                              f"checkpoint is at {steps}; continue from there with train(..., resume=True)")
        return steps

    def _training_in_directory(self) -> Training:
        """Return the arguments of `train` in the directory of the run."""
        if self.log_dir is None:
            raise ConfigError("this agent was not trained by train, so it cannot be trained further")
        options = load_config(self.log_dir / RUN_FILE, trust=self._trust)
        return Training(str(options.pop("algorithm")), cast("EnvSource", options.pop("env")), options)

    @brief_errors
    def evaluate(
        self, num_episodes: int = 10, *, deterministic: bool = True, seed: int | None = None,
        envs: EnvFactory | None = None,
    ) -> Evaluation:
        """Play whole episodes in the test environments and report raw returns.

        Each environment plays a fixed number of episodes, because counting the first episodes that finish would favor
        short episodes. At most `num_eval_envs` (8) environments play at the same time, and never more than there are
        episodes. They are kept for the next call.

        Args:
            num_episodes: Number of episodes, at least 1.
            deterministic: Whether the policy takes its best action instead of sampling one.
            seed: Seed of the environments and of sampled actions; None: the seed of the experiment.
            envs: A factory of other environments with the same spaces, where only the bounds of observations may
                differ; None: the test environments of the agent.

        Raises:
            ConfigError: `num_episodes` is not a whole number >= 1, the seed is not valid, or `envs` is no factory of
                environments.
            SpaceError: The spaces of `envs` differ from those of the agent.
            EnvError: An environment raised an exception, or an episode did not end within a million steps, and
                `max_episode_steps` was not given.
            NonFiniteDataError: An observation or the return of an episode is NaN or infinite.
        """
        num_episodes = check_whole("num_episodes", num_episodes)
        if envs is not None:
            _check_envs(envs, self.agent.play_envs)
        # For small batches, two threads are no faster than one, and several times slower on machines with few cores.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            evaluation = self._evaluator(seed, envs).evaluate(self._weights(), num_episodes, deterministic)
        finally:
            torch.set_num_threads(num_threads)
        assert evaluation is not None  # only an interrupted evaluation returns None, and nothing interrupts this call
        return evaluation

    @functools.cached_property
    def policy(self) -> Policy | dict[str, Policy]:
        """The deterministic policy as a `torch.nn.Module`; with several policies, a mapping from policy to module.

        The module takes batches of observations as tensors; see `Policy`.
        """
        policies = {policy: parts.policy() for policy, parts in self._acting.parts.items()}
        return policies if isinstance(self.agent.play_envs, MultiAgentEnvFactory) else policies[POLICY]

    def act(
        self, obs: Observation, memory: MemoryState = None, *, deterministic: bool = True, mask: Mask = None,
    ) -> Chosen:
        """Choose the action for one observation of one environment.

        Args:
            obs: The environment's observation; with several agents, a mapping from agents to observations.
            memory: The memory that the previous call of this episode returned; None at the start of an episode.
            deterministic: Whether the policy takes its best action instead of sampling one.
            mask: (n,) bool, true where one of the n actions is allowed. Give it if the environment returns masks in
                `info`; with several agents, a mapping from agents to masks.

        Returns:
            An action that the environment accepts; with several agents, a mapping from agents to actions. If a policy
            has memory, a pair of the action and the next memory.

        Raises:
            ConfigError: The observation does not fit the observation space or is not finite, a mask is missing or
                wrong, or the environments have several agents, and `obs` is not a mapping from agents to observations.
        """
        return self._acting.act(obs, memory, mask, deterministic)

    @functools.cached_property
    def _acting(self) -> Acting:
        return Acting(self.agent, self.acting_state, self.seed)

    @brief_errors
    def export(
        self, path: str | os.PathLike[str] | None = None, *, to: str = "onnx", checks: int = 1000,
        overwrite: bool = False,
    ) -> tuple[Exported, ...]:
        """Write each policy to a file that works without this library; check that the file chooses the same actions.

        Half of the observations for the comparison come from episodes in the test environments, and half are drawn from
        the observation space. Discrete actions must be equal. Continuous actions may differ by 1e-5 times the largest
        absolute action, or by 1e-5 if no action is larger than 1.

        Args:
            path: Path of the file; with several policies, the names are `<stem>-<policy><suffix>` instead. None:
                `policy.onnx`, `policy.pt2` or `policy.safetensors` in the directory of the run.
            to: "onnx" (for onnxruntime), "torch" (a program of `torch.export`), or "safetensors" (weights, and a
                description of the computation).
            checks: Number of observations for which actions are compared.
            overwrite: Whether to replace existing files.

        Raises:
            ConfigError: The format is unknown, its packages are missing, the file exists, or `path` is None for an
                agent without a directory.
            ExportError: The policy cannot be exported, or its file chose other actions than the agent and was deleted.
        """
        # The import is inside the method, because torch.export takes long to import, and few programs need it.
        from pytorchrl.export import Exporter, default_name

        if path is None and self.log_dir is None:
            raise ConfigError("path must name the file, because this agent has no directory of a run")
        if self._exporter is None:
            self._exporter = Exporter(self._acting, self.agent.play_envs, self.seed)
        file = Path(self.log_dir or "") / default_name(to) if path is None else Path(path).expanduser()
        return self._exporter.export(file, to, checks, overwrite)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Save the policy in the format of `Scheme.save_model`; an actor's option `checkpoint` can load the file."""
        return save(path, {"format": MODEL_FORMAT, "version": self._version, "acting_state": self.acting_state})

    @property
    def _version(self) -> int:
        return int(self.summary.get("updates", 0))

    def _weights(self) -> Weights:
        return Weights(self._version, {name: tensor.numpy() for name, tensor in self.acting_state.items()})

    def _evaluator(self, seed: int | None = None, envs: EnvFactory | None = None) -> Evaluator:
        return Evaluator(
            1, algo_factory=self.agent.algo_factory, actor_factory=self.agent.actor_factory,
            test_envs_factory=self.agent.play_envs if envs is None else envs,
            seed=self.seed if seed is None else check_seed(seed), kept=self._kept_envs if envs is None else None)

    @functools.cached_property
    def _kept_envs(self) -> KeptEnvs:
        """The environments of `evaluate`, which are closed when this object is deleted or the process ends."""
        kept = KeptEnvs(self.agent.play_envs)
        weakref.finalize(self, kept.close)
        return kept


def _check_envs(envs: object, known: EnvFactory) -> None:
    """Refuse environments for an evaluation that are not given by a factory, or have other spaces than the agent's."""
    if not isinstance(envs, EnvFactory):
        raise ConfigError(f"envs must be a factory of environments, got {envs!r:.100}; give "
                          "VecEnv.create_factory(env), where env is an id or a function")
    for name, fits in (("observation_space", has_form), ("action_space", operator.eq)):
        if not fits(given := getattr(envs, name), expected := getattr(known, name)):
            raise SpaceError(f"{name} differs: the agent was trained with {expected}, envs have {given}; give "
                             "environments with equal spaces")
