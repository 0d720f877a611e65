"""From a name and flat options to a trained agent: `train("ppo", "CartPole-v1", lr=1e-3, num_col_workers=2)`.

Each option belongs to exactly one part of the agent, to the scheme or to the learner, and is routed there. The command
line is made of the same table.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytorchrl import presets
from pytorchrl.agent.actors import OnPolicyActor
from pytorchrl.agent.algorithms import A2C, PPO
from pytorchrl.agent.data import Episode
from pytorchrl.agent.env import EnvFactory, VecEnv
from pytorchrl.agent.options import Factory, Schedule
from pytorchrl.agent.seeding import Stream, check_seed, derive_seed
from pytorchrl.agent.storages import GAEBuffer
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.learner import Learner
from pytorchrl.reporting import MODEL_NAME, RUN_FILE
from pytorchrl.scheme import Evaluation, Scheme

ALGORITHMS: dict[str, type[PPO] | type[A2C]] = {"ppo": PPO, "a2c": A2C}

# What the user's options are called where a part has another name for it, or the same name for something else.
_RENAMED = {"environments": {"vec_env_size": "num_envs"}, "storage": {"size": "num_steps"}}
_NOT_OPTIONS = {
    "environments": {"env_fn", "log_dir", "num_threads"},
    "actor": {"observation_space", "action_space"},
    "scheme": {"algo_factory", "actor_factory", "storage_factory", "train_envs_factory", "test_envs_factory",
               "runtime"},
}
_EVALUATION_ENVS = 8


@dataclass(frozen=True)
class OptionSpec:
    """One option as the user sees it."""

    name: str
    part: str
    """environments, actor, algorithm, storage, scheme or learner."""
    own_name: str
    """What the part itself calls it."""
    hint: Any
    default: Any
    help: str
    choices: tuple[Any, ...] | None = None


def option_specs(algorithm: str) -> dict[str, OptionSpec]:
    """All options of `train(algorithm, ...)`, by name.

    Raises:
        ConfigError: No such algorithm.
    """
    specs: dict[str, OptionSpec] = {}
    parts = {"learner": Learner, "algorithm": algorithm_class(algorithm), "storage": GAEBuffer,
             "actor": OnPolicyActor, "environments": VecEnv}
    found = [spec for part, owner in parts.items() for spec in _declared(part, owner)] + _scheme_specs()
    for spec in found:
        if spec.name in specs:
            raise AssertionError(f"{spec.name} is an option of {spec.part} and of {specs[spec.name].part}")
        specs[spec.name] = spec
    return specs


def algorithm_class(name: str) -> type[PPO] | type[A2C]:
    """The algorithm of that name; raises `ConfigError` with the nearest one."""
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(str(name), ALGORITHMS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"algorithm must be one of {list(ALGORITHMS)}, got {name!r}{hint}")
    return ALGORITHMS[name]


def _declared(part: str, owner: Any) -> list[OptionSpec]:
    hints = typing.get_type_hints(owner.Options)
    renamed, left_out = _RENAMED.get(part, {}), _NOT_OPTIONS.get(part, set())
    return [
        OptionSpec(
            name=renamed.get(field.name, field.name), part=part, own_name=field.name, hint=hints[field.name],
            default=_default_of(field), help=field.metadata.get("help", ""), choices=field.metadata.get("choices"))
        for field in dataclasses.fields(owner.Options) if field.name not in left_out
    ]


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _scheme_specs() -> list[OptionSpec]:
    """The scheme's keyword arguments; their help is its docstring."""
    hints, texts = typing.get_type_hints(Scheme.__init__), _documented_arguments(Scheme.__doc__ or "")
    return [
        OptionSpec(name=name, part="scheme", own_name=name, hint=hints[name], default=parameter.default,
                   help=texts.get(name, ""))
        for name, parameter in inspect.signature(Scheme).parameters.items() if name not in _NOT_OPTIONS["scheme"]
    ]


def _documented_arguments(docstring: str) -> dict[str, str]:
    """Name -> text, from the `Args:` section of a Google-style docstring."""
    section = re.search(r"^Args:\n(.*?)(?:^\S|\Z)", inspect.cleandoc(docstring), re.DOTALL | re.MULTILINE)
    if section is None:
        return {}
    texts: dict[str, str] = {}
    for names, text in re.findall(r"^ {4}([\w, ]+):(.*?)(?=^ {4}\S|\Z)", section.group(1), re.DOTALL | re.MULTILINE):
        for name in names.split(", "):
            texts[name] = " ".join(text.split())
    return texts


@dataclass(frozen=True)
class Agent:
    """The four factories of an agent, and those of its test environments."""

    algorithm: Factory[Any]
    actor: Factory[Any]
    storage: Factory[Any]
    train_envs: Any
    test_envs: Any


def compose(
    algorithm: str, env: str | Callable[..., Any], options: Mapping[str, Any],
) -> tuple[Agent, dict[str, Any], dict[str, Any]]:
    """Route flat options to their parts, over the preset for this algorithm and environment.

    Returns:
        The agent, the scheme's keyword arguments, and the learner's options (`target_steps` among them).

    Raises:
        ConfigError: An option is unknown or wrong; unknown ones are named with the nearest known one.
    """
    specs = option_specs(algorithm)
    _refuse_unknown(options, specs)
    parts: dict[str, dict[str, Any]] = {spec.part: {} for spec in specs.values()}
    for name, value in {**presets.preset(algorithm, env), **options}.items():
        parts[specs[name].part][specs[name].own_name] = value
    train_envs, test_envs = presets.environments(env, parts["environments"], _EVALUATION_ENVS)
    agent = Agent(
        algorithm=algorithm_class(algorithm).create_factory(**parts["algorithm"]),
        actor=OnPolicyActor.create_factory(train_envs.observation_space, train_envs.action_space, **parts["actor"]),
        storage=GAEBuffer.create_factory(**parts["storage"]), train_envs=train_envs, test_envs=test_envs)
    return agent, parts["scheme"], parts["learner"]


def _refuse_unknown(options: Mapping[str, Any], specs: Mapping[str, OptionSpec]) -> None:
    problems = []
    for name in options:
        if name not in specs:
            near = difflib.get_close_matches(name, specs, n=1)
            problems.append(f"there is no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if problems:
        raise ConfigError("; ".join(problems))


def make_learner(algorithm: str, env: str | Callable[..., Any], **options: Any) -> tuple[Learner, Agent]:
    """A learner that has not started, and its agent; options as for `train`."""
    agent, scheme_options, learner_options = compose(algorithm, env, options)
    scheme = Scheme(agent.algorithm, agent.actor, agent.storage, agent.train_envs, agent.test_envs, **scheme_options)
    # What is no plain value (a function, a module) cannot be built again from a file.
    recorded = {name: _to_json(value) for name, value in {**presets.preset(algorithm, env), **options}.items()}
    recipe = {}
    if isinstance(env, str) and _is_plain(recorded):
        recipe = {"algorithm": algorithm, "env": env, "options": recorded}
    return Learner(scheme, recipe=recipe, **learner_options), agent


def train(
    algorithm: str, env: str | Callable[..., Any], *, target_steps: int | None = None,
    log_dir: str | os.PathLike[str] | None = None, **options: Any,
) -> TrainedAgent:
    """Train an agent and stop; the shortest way from nothing to a policy.

        agent = pytorchrl.train("ppo", "CartPole-v1", target_steps=200_000)
        print(agent.return_mean, agent.evaluate(100).return_mean)

    Args:
        algorithm: "ppo" or "a2c".
        env: A gymnasium id, or a function that makes one environment.
        target_steps: Env steps of the whole experiment; None takes what the preset for this environment says.
        log_dir: Directory of this run; None keeps nothing.
        **options: Any option of the algorithm, storage, actor, environments, scheme or learner, by name, e.g. `lr`,
            `num_steps`, `hidden_sizes`, `num_envs`, `num_col_workers`, `eval_every`, `seed`.

    Returns:
        The trained agent, with the run's figures.

    Raises:
        ConfigError: An option is unknown or wrong; nothing has been started.
        PyTorchRLError: What went wrong in training.
    """
    given = {"target_steps": target_steps, "log_dir": log_dir}
    learner, agent = make_learner(algorithm, env, **options, **{k: v for k, v in given.items() if v is not None})
    with learner:
        learner.train()
        acting_state = learner.scheme.acting_state()
    return TrainedAgent(agent=agent, acting_state=acting_state, seed=learner.scheme.seed, summary=learner.summary())


def load(run_dir: str | os.PathLike[str], *, model: str = MODEL_NAME) -> TrainedAgent:
    """The agent that a run of `train` (or `pytorchrl train`) with a `log_dir` has saved.

    Args:
        run_dir: That directory.
        model: Name of the model in it, without `.pt`.

    Raises:
        CheckpointError: There is no run, no such model, it cannot be read, or the run was composed in Python.
    """
    recipe, seed = _read_recipe(Path(run_dir))
    agent, _, _ = compose(recipe["algorithm"], recipe["env"], recipe["options"])
    return TrainedAgent(agent=agent, acting_state=read_model(Path(run_dir) / f"{model}.pt"), seed=seed)


def read_model(path: Path) -> dict[str, torch.Tensor]:
    """The acting state in a saved model. Nothing in the file is executed.

    Raises:
        CheckpointError: It is missing, or not a model of this package.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no model {str(path)!r}") from None
    except Exception as error:
        raise CheckpointError(f"{str(path)!r} is not a saved model: {error}") from error
    state = saved.get("acting_state") if isinstance(saved, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{str(path)!r} holds no acting state; only files of save_model can be loaded")
    return state


def _read_recipe(run_dir: Path) -> tuple[dict[str, Any], int]:
    path = run_dir / RUN_FILE
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        recipe, seed = run["recipe"], check_seed(run["seed"])
    except FileNotFoundError:
        raise CheckpointError(f"{str(run_dir)!r} holds no run: {RUN_FILE} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} does not describe a run: {error!r}") from error
    if not recipe:
        raise CheckpointError(
            f"the run in {str(run_dir)!r} was composed in Python and cannot be built from its files; "
            "build the same actor with checkpoint=<its model.pt>")
    try:
        specs = option_specs(recipe["algorithm"])
        options = {name: _from_json(specs, name, value) for name, value in recipe["options"].items()}
        return {"algorithm": recipe["algorithm"], "env": str(recipe["env"]), "options": options}, seed
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{str(path)!r} does not describe an agent of this version: {error}") from error


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _to_json(value: Any) -> Any:
    """An option as JSON holds it; `_from_json` is its inverse."""
    if isinstance(value, Schedule):
        return {"schedule": dataclasses.asdict(value)}
    if isinstance(value, (tuple, list)):
        return [_to_json(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def _from_json(specs: Mapping[str, OptionSpec], name: str, value: Any) -> Any:
    if name not in specs:
        raise ConfigError(f"it has the option {name!r}, which is not known")
    if isinstance(value, dict) and set(value) == {"schedule"}:
        return Schedule(**value["schedule"])
    return tuple(value) if isinstance(value, list) else value


class TrainedAgent:
    """A trained policy with the environments to try it in.

    Attributes:
        agent: Its factories.
        acting_state: name -> tensor, all that acting needs: parameters and normalisers.
        seed: Of the experiment it comes from.
        summary: Figures of its run, as `pytorchrl train --json` prints them; empty after `load`.
    """

    def __init__(
        self, *, agent: Agent, acting_state: Mapping[str, torch.Tensor], seed: int,
        summary: Mapping[str, Any] | None = None,
    ) -> None:
        self.agent, self.acting_state, self.seed = agent, dict(acting_state), seed
        self.summary = dict(summary or {})

    @property
    def return_mean(self) -> float | None:
        """Mean raw return of the last 100 training episodes; None if there were none, or after `load`."""
        return self.summary.get("return_mean")

    def evaluate(
        self, num_episodes: int = 10, *, deterministic: bool = True, seed: int | None = None,
        envs: EnvFactory | None = None,
    ) -> Evaluation:
        """Play whole episodes in the test environments and report raw returns.

        Episodes are given to environments beforehand: taking the first to finish would favour short ones.

        Args:
            num_episodes: How many, from 1.
            deterministic: Whether the policy takes its best action instead of drawing one.
            seed: Of the environments and of drawn actions; None takes the experiment's.
            envs: Other environments with the same spaces.

        Raises:
            ConfigError: `num_episodes` is not a whole number from 1, or the seed is none.
        """
        if isinstance(num_episodes, bool) or not isinstance(num_episodes, int) or num_episodes < 1:
            raise ConfigError(f"num_episodes must be a whole number from 1, got {num_episodes!r}")
        seed = self.seed if seed is None else check_seed(seed)
        algorithm = self._build(seed)
        factory = envs if envs is not None else self.agent.test_envs
        vector = factory(mode="test", seed=seed)
        try:
            episodes = play(vector, algorithm, num_episodes, deterministic=deterministic)
        finally:
            vector.close()
        return Evaluation(version=self.summary.get("updates", 0), returns=[e.env_return for e in episodes],
                          lengths=[e.length for e in episodes])

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write the policy as `Scheme.save_model` does; returns the path."""
        return save_acting_state(self.acting_state, path)

    def _build(self, seed: int) -> Any:
        actor = self.agent.actor(device="cpu", seed=derive_seed(seed, Stream.INIT))
        algorithm = self.agent.algorithm(device="cpu", actor=actor, seed=derive_seed(seed, Stream.EVALUATION))
        algorithm.load_acting_state(self.acting_state)
        return algorithm


def play(envs: VecEnv, algorithm: Any, num_episodes: int, *, deterministic: bool) -> list[Episode]:
    """Play exactly `num_episodes` episodes, shared out over the environments beforehand."""
    left = [num_episodes // envs.num_envs + (e < num_episodes % envs.num_envs) for e in range(envs.num_envs)]
    played: list[Episode] = []
    obs, mask = envs.reset()
    rhs = algorithm.actor.initial_states(envs.num_envs)
    done = torch.ones(envs.num_envs, dtype=torch.bool)
    while any(left):
        acting = algorithm.acting_step(
            {leaf: torch.as_tensor(array) for leaf, array in obs.items()}, rhs, done, deterministic=deterministic,
            mask=None if mask is None else torch.as_tensor(mask))
        step = envs.step(acting.clipped_action.numpy())
        obs, mask, rhs, done = step.obs, step.mask, acting.rhs, torch.as_tensor(step.first)
        for episode in step.episodes:
            if left[episode.env_index]:
                left[episode.env_index] -= 1
                played.append(episode)
    return played
