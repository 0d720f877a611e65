"""From flat options to the factories of an agent.

Each option belongs to exactly one part of the agent, to the scheme or to the learner, and is routed there. The command
line is made of the same table.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pytorchrl import presets
from pytorchrl.agent.algorithms import A2C, APPO, DDPG, DQN, IMPALA, PPO, R2D2, SAC, TD3, Algorithm
from pytorchrl.agent.data import DataKind
from pytorchrl.agent.env import EnvFactory, VecEnv
from pytorchrl.agent.fit import check_algorithm_space
from pytorchrl.agent.multi.compose import multi_agent
from pytorchrl.agent.multi.env import MultiAgentEnvFactory
from pytorchrl.agent.names import Known, meaning, refuse_unknown
from pytorchrl.agent.options import Factory
from pytorchrl.agent.storages import (
    GAEBuffer,
    PERBuffer,
    ReplayBuffer,
    RolloutSequenceBuffer,
    SequenceBuffer,
    Storage,
    VTraceBuffer,
)
from pytorchrl.errors import ConfigError
from pytorchrl.learner import Learner
from pytorchrl.scheme import Scheme
from pytorchrl.scheme.architectures import PRESETS
from pytorchrl.scheme.replay.storage_options import STORAGE_OPTIONS

ALGORITHMS: dict[str, type[Algorithm]] = {
    "ppo": PPO, "a2c": A2C, "impala": IMPALA, "appo": APPO, "dqn": DQN, "ddpg": DDPG, "td3": TD3, "sac": SAC,
    "r2d2": R2D2}
REPLAY_ALGORITHMS = ("dqn", "ddpg", "td3", "sac")
_STORAGES: dict[str, type[Storage]] = {
    "ppo": GAEBuffer, "a2c": GAEBuffer, "impala": VTraceBuffer, "appo": VTraceBuffer, "r2d2": SequenceBuffer}
_STORAGES_OF_ROLLOUTS: dict[str, type[ReplayBuffer]] = {"r2d2": RolloutSequenceBuffer}
"""Storages that replace those above with `kind="batch"`."""

# What the user's options are called where a part has another name for it, or the same name for something else.
_RENAMED = {"environments": {"vec_env_size": "num_envs", "policy_of": "policies"}, "storage": {"size": "num_steps"}}
_RENAMED_IN_REPLAY = {"size": "replay_size", "rollout_size": "num_steps", "epsilon": "priority_epsilon"}
_NOT_OPTIONS = {
    "environments": {"env_fn", "log_dir", "num_threads"},
    "actor": {"observation_space", "action_space"},
    "scheme": {"algo_factory", "actor_factory", "storage_factory", "train_envs_factory", "test_envs_factory",
               # Those of the storage, which is made of the same options.
               "prioritized", *STORAGE_OPTIONS},
}
_EVALUATION_ENVS = 8
_POLICIES = typing.Union[  # noqa: UP007 - a Literal beside a generic class
    typing.Literal["shared", "independent"], Mapping[str, str], Callable[[str], str], None]


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
    parts = {"learner": Learner, "algorithm": algorithm_class(algorithm), "storage": _STORAGES.get(algorithm, PERBuffer),
             "actor": _actor_class(algorithm), "environments": VecEnv}
    found = [spec for part, owner in parts.items() for spec in _declared(part, owner)] + _scheme_specs()
    if algorithm in REPLAY_ALGORITHMS:
        found.append(OptionSpec(
            name="prioritized", part="storage", own_name="prioritized", hint=bool, default=False,
            help="Draw transitions with large errors more often; alpha, beta and the like are for this."))
    found.append(OptionSpec(
        name="policies", part="environments", own_name="policy_of", hint=_POLICIES, default=None,
        help="Of an environment of several agents, who decides for them: one policy for all (shared, which also holds if nothing is "
             "given), one for each agent (independent), or a mapping from agent to policy."))
    if algorithm_class(algorithm).learns_from is DataKind.OLDER_ROLLOUTS:  # others have it among the options of their storage
        found.append(OptionSpec(
            name="replay_size", part="scheme", own_name="size", hint=typing.Optional[int], default=None,  # noqa: UP045
            help="Env steps of rollouts that all shards keep together; with num_replay_workers."))
    for spec in found:
        if spec.name in specs:
            raise AssertionError(f"{spec.name} is an option of {spec.part} and of {specs[spec.name].part}")
        specs[spec.name] = spec
    return specs


def known_names(algorithm: str) -> Known:
    """Return the options of `train(algorithm, ...)`, name -> (home, own name), for suggestions in errors."""
    of_storage = _STORAGES.get(algorithm, PERBuffer).home
    specs = option_specs(algorithm).values()
    return {"env": ("environments", "env_fn"),
            **{spec.name: (of_storage if spec.part == "storage" else spec.part, spec.own_name) for spec in specs}}


def _actor_class(algorithm: str) -> Any:
    return algorithm_class(algorithm).actor_class


def _storage_factory(algorithm: str, options: dict[str, Any], kind: str | None = None) -> Factory[Any]:
    if kind == "batch" and algorithm in _STORAGES_OF_ROLLOUTS:
        return _uniform_factory(_STORAGES_OF_ROLLOUTS[algorithm], options, "whole rollouts are drawn uniformly; leave out kind='batch'")
    if algorithm in _STORAGES:
        return _STORAGES[algorithm].create_factory(**options)
    is_prioritized = options.pop("prioritized", False)
    if not isinstance(is_prioritized, bool):
        raise ConfigError(f"prioritized must be True or False, got {is_prioritized!r}")
    if is_prioritized:
        return PERBuffer.create_factory(**options)
    # Some names of storage options mean an option of the algorithm in other libraries, such as `alpha` of SAC.
    others = {name: place for name, place in known_names(algorithm).items() if place[0] != "replay"}
    hints = "".join(meaning(name, others) for name in options)
    return _uniform_factory(ReplayBuffer, options, f"transitions are drawn uniformly; add prioritized=True{hints}")


def _uniform_factory(storage: type[ReplayBuffer], options: dict[str, Any], why: str) -> Factory[Any]:
    """Return a factory of `storage`; raise `ConfigError`, which states `why`, for options that the storage does not have."""
    own = {field.name for field in dataclasses.fields(storage.Options)}
    if others := [_RENAMED_IN_REPLAY.get(name, name) for name in options if name not in own]:
        raise ConfigError(f"{', '.join(others)} would be ignored: {why}")
    return storage.create_factory(**options)


def algorithm_class(name: str) -> type[Algorithm]:
    """Return the algorithm of that name; raise `ConfigError` with the nearest one."""
    if name not in ALGORITHMS:
        text = str(getattr(name, "__name__", name))  # of a class, such as PPO for "ppo", the name counts
        near = difflib.get_close_matches(text.lower(), ALGORITHMS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"algorithm must be one of {list(ALGORITHMS)}, got {name!r}{hint}")
    return ALGORITHMS[name]


def _declared(part: str, owner: Any) -> list[OptionSpec]:
    hints = typing.get_type_hints(owner.Options)
    renamed, left_out = _RENAMED.get(part, {}), _NOT_OPTIONS.get(part, set())
    if issubclass(owner, ReplayBuffer):
        renamed = _RENAMED_IN_REPLAY
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
    hints, texts = typing.get_type_hints(Scheme.__init__), documented_arguments(Scheme.__doc__ or "")
    preset = OptionSpec(
        name="preset", part="scheme", own_name="preset", hint=typing.Optional[typing.Literal[tuple(PRESETS)]],  # noqa: UP045
        default=None, help="Of `train` and the command line: a scheme with a name of its own, such as `Scheme.a3c`, whose settings hold "
             "where nothing else is given.")
    return [preset] + [
        OptionSpec(name=name, part="scheme", own_name=name, hint=hints[name], default=parameter.default,
                   help=texts.get(name, ""))
        for name, parameter in inspect.signature(Scheme).parameters.items() if name not in _NOT_OPTIONS["scheme"]
    ]


def documented_arguments(docstring: str) -> dict[str, str]:
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
    train_envs: EnvFactory
    test_envs: EnvFactory


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
    refuse_unknown(options, known_names(algorithm))
    parts: dict[str, dict[str, Any]] = {spec.part: {} for spec in specs.values()}
    for name, value in {**presets.preset(algorithm, env, options), **options}.items():
        parts[specs[name].part][specs[name].own_name] = value
    try:
        train_envs, test_envs = presets.environments(env, parts["environments"], _EVALUATION_ENVS)
        agent = Agent(*_factories(algorithm, train_envs, parts), train_envs=train_envs, test_envs=test_envs)
    except ConfigError as error:
        raise type(error)(_in_users_words(str(error))) from error
    return agent, parts["scheme"], parts["learner"]


def _factories(algorithm: str, envs: EnvFactory, parts: Mapping[str, dict[str, Any]]) -> tuple[Factory[Any], Factory[Any], Factory[Any]]:
    """Of algorithm, actor and storage; of several policies all have the same options."""
    of_algorithm = algorithm_class(algorithm).create_factory(**parts["algorithm"])
    make_actor, of_actor = _actor_class(algorithm).create_factory, dict(parts["actor"])
    of_storage = _storage_factory(algorithm, parts["storage"], parts["scheme"].get("kind"))
    if not isinstance(envs, MultiAgentEnvFactory):
        check_algorithm_space(algorithm_class(algorithm), envs.action_space)
        return of_algorithm, make_actor(envs.observation_space, envs.action_space, **of_actor), of_storage
    checkpoint = of_actor.pop("checkpoint", None)  # a saved model is that of all policies
    return multi_agent(envs, of_algorithm, functools.partial(make_actor, **of_actor), of_storage, checkpoint=checkpoint)


def _in_users_words(text: str) -> str:
    for names in _RENAMED.values():
        for own_name, name in names.items():
            text = re.sub(rf"\b{own_name}(?= must\b)", name, text)
    return text
