"""Build single environments. Worker processes of `backend="async"` import this module, so it must not import torch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, find_highest_version, load_env_creator
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import TimeLimit
from typing_extensions import override

from pytorchrl.agent.env.action_checks import speed_up_action_check
from pytorchrl.agent.env.aliases import (
    MASK_LEAF,
    AnyEnv,
    AnySpace,
    AnyWrapper,
    EnvFn,
    EnvKwargs,
    EnvObject,
    EnvWrapper,
    Info,
    ResetResult,
)
from pytorchrl.agent.env.deadlines import TimedEnv
from pytorchrl.agent.env.guard import GuardedEnv, describe, space_problem
from pytorchrl.agent.env.restarts import RememberingEnv, RestartingEnv, Restarts
from pytorchrl.agent.env.tensors.jax import FunctionalVector, is_functional
from pytorchrl.agent.env.wrappers import FrameStack, MaskMethod
from pytorchrl.errors import ConfigError, EnvError, FactoryError, PyTorchRLError, install_hint
from pytorchrl.support.code import import_extra, import_module, missing_package
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.tracebacks import USER_ERRORS, reraise_of_signal

TURN_BASED = (
    "pass a function that returns pettingzoo.utils.conversions.turn_based_aec_to_parallel(env), and "
    "policies='shared' or 'independent'")
"""Remedy for an environment of PettingZoo's turn-based API."""

# For each namespace: the module that registers its ids, and the extra that installs this module.
_NAMESPACES: dict[str, tuple[str, str | None]] = {
    "ALE": ("ale_py", "atari"), "pytorchrl": ("pytorchrl.envs.classic", None)}
# Beginning of ids -> the module that registers such ids when it is imported, and the package that contains the module.
_PACKAGES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("Fetch", "HandReach", "HandManipulate", "AdroitHand", "FrankaKitchen", "PointMaze", "AntMaze"),
                    ("gymnasium_robotics", "gymnasium-robotics")),
    **dict.fromkeys(("MiniGrid-", "BabyAI-"), ("minigrid", "minigrid")),
    **dict.fromkeys(("highway-", "merge-", "roundabout-", "parking-", "intersection-", "racetrack-"),
                    ("highway_env", "highway-env")),
    **dict.fromkeys(("dm_control/", "OpenSpiel", "Bsuite"), ("shimmy", "shimmy")),
    "MiniWorld-": ("miniworld", "miniworld"), "mo-": ("mo_gymnasium", "mo-gymnasium"),
    "FlappyBird-": ("flappy_bird_gymnasium", "flappy-bird-gymnasium"), "PyFlyt/": ("PyFlyt.gym_envs", "PyFlyt"),
    "Stable-Retro": ("stable_retro", "stable-retro"), "myo": ("myosuite", "myosuite"),
    "Panda": ("panda_gym", "panda-gym"),
}
OLD_ID = re.compile(r"(?P<game>[A-Z][A-Za-z]*?)(?P<frames>NoFrameskip|Deterministic)?-v(?P<version>[045])")
"""Form of the older ids of Atari, such as "BreakoutNoFrameskip-v4", "BreakoutDeterministic-v0" and "Breakout-v4"."""
# Text in the entry point or the import error of an environment -> the extra that installs the missing package.
_EXTRAS = {"box2d": "box2d", "mujoco": "mujoco", "ale_py": "atari", "envpool": "envpool"}
_logger = get_logger(__name__)

MAKE_ONE = "give a function that makes one environment, such as lambda: MyEnv()"
"""Remedy where an environment is given, but several are needed."""
MAKE_VECTOR = "give a function that takes num_envs, such as lambda num_envs: MyEnvs(num_envs)"
"""Remedy where a vector of environments is given, but several are needed."""


class GivenEnv:
    """A function that returns an environment that the user has built.

    Only one vector environment at a time may use it. Closing this vector environment does not close the environment,
    which belongs to the user.

    Args:
        env: The environment.

    Attributes:
        remedy: What to do where several environments are needed.
    """

    remedy: ClassVar[str] = MAKE_ONE

    def __init__(self, env: AnyEnv) -> None:
        self.env = env

    def __call__(self) -> AnyEnv:
        """Return the environment, inside a wrapper that does not close it."""
        return _LeftOpen(self.env)

    def __repr__(self) -> str:
        return f"<an environment of the class {type(unwrapped(self.env)).__name__}>"


class _LeftOpen(AnyWrapper):
    def close(self) -> None:
        """Do nothing, because the environment belongs to the user."""


class GivenVector(GivenEnv):
    """A function that returns a vector of environments that the user has built; see `GivenEnv`."""

    remedy = MAKE_VECTOR

    @override
    def __call__(self, num_envs: int = 1) -> EnvObject:
        """Return the vector of environments, which has its own number of environments."""
        return self.env


class GivenFunctional:
    """A function that returns an environment of JAX that the user has built.

    The environment has no state of its own, so several workers may use it.

    Args:
        env: The environment, or a pair of it and its parameters.
    """

    def __init__(self, env: EnvObject) -> None:
        self.env = env

    def __call__(self) -> EnvObject:
        """Return the environment."""
        return self.env

    def __repr__(self) -> str:
        env = self.env[0] if isinstance(self.env, tuple) else self.env
        return f"<an environment of the class {type(env).__name__}>"


class BuiltVector(Exception):  # noqa: N818 - it is no error
    """Reports that a function has built a vector of environments, `env`, instead of one environment."""

    def __init__(self, env: EnvObject) -> None:
        super().__init__()
        self.env = env


def unwrapped(env: EnvObject) -> EnvObject:
    """Return an environment without Gymnasium's wrappers; other objects are returned as they are."""
    return env.unwrapped if isinstance(env, (gym.Env, VectorEnv)) else env


def is_vector(env: object) -> bool:
    """Return whether an object steps several environments at once; a class does not, but its instances may."""
    if isinstance(env, VectorEnv):
        return True
    number = getattr(unwrapped(env), "num_envs", None)
    return not inspect.isclass(env) and isinstance(number, (int, np.integer)) and callable(getattr(env, "step", None))


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Settings from which one vector environment is built; most of them are options of `VecEnv`."""

    env_fn: EnvFn
    env_kwargs: EnvKwargs
    num_envs: int
    backend: str
    autoreset: str
    max_episode_steps: int | None
    frame_stack: int
    wrappers: tuple[EnvWrapper, ...]
    num_threads: int
    seeds: list[int]
    where: str
    """Name of the worker, for error messages."""
    truncation: str
    """See the option of `VecEnv`."""
    restarts: Restarts | None = None
    """Restart budget; if None, an exception in an environment ends the run."""
    timeout_s: float | None = None
    """Longest time of one call of an environment, in seconds; native vector environments, which step all environments
    in one call, are then refused."""
    needs_restarts: bool = False
    """Whether `on_env_error="restart"` is set; native vector environments, which cannot restart, are then refused."""


def find_spec(env_id: str | EnvSpec) -> EnvSpec:
    """Return the specification that is registered for an id.

    Raises:
        ConfigError: The id is unknown (the message names similar ids), or its package is not installed (the message
            says how to install it).
    """
    if isinstance(env_id, EnvSpec):
        return env_id
    name = env_id
    if ":" in name:
        module, name = name.split(":", 1)
        import_module(module, env_id)
    namespace = name.split("/", 1)[0] if "/" in name else None
    if namespace in _NAMESPACES and name not in gym.registry:
        module, extra = _NAMESPACES[namespace]
        gym.register_envs(import_extra(module, extra, f"the id {name!r}") if extra else importlib.import_module(module))
    if name in gym.registry:
        return gym.registry[name]
    try:
        return gym.spec(name)  # raises an error that says why the id is unknown
    except gym.error.Error as failure:
        raise ConfigError(f"there is no environment {env_id!r}; {_advice(name)} ({failure})") from failure


def _advice(name: str) -> str:
    """Return what to do about an unknown id: similar ids, and how the ids of other packages are written."""
    near = difflib.get_close_matches(name, list(gym.registry), n=3, cutoff=0.5)
    if (old := OLD_ID.fullmatch(name)) is not None:
        with contextlib.suppress(ImportError):
            importlib.import_module("ale_py")  # registers its ids
        of_ale = f"ALE/{old['game']}-v5"
        near = [of_ale] if of_ale in gym.registry else near
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    found = next((place for start, place in _PACKAGES.items() if name.startswith(start)), None)
    if found is not None:
        module, package = found
        return (f"{meant}Ids like this one are registered by {module}: write '{module}:{name}'; install "
                f"{package} if it is missing")
    hint = ("Is its package imported? Name an environment of another package or of your own 'module:id', where the "
            "module registers the id with gymnasium.register, or pass its class in Python.")
    if "/" in name and name.replace("/", "").isidentifier():
        hint += f" A module of PettingZoo is named with dots, {name.replace('/', '.')!r}"
    return meant + hint


def version_warnings(env_fn: EnvFn) -> Iterator[str]:
    """Yield a warning if an id has a newer version, as `gymnasium.make` warns if it gets the id itself.

    Args:
        env_fn: The environment, which was already built, so its id is registered unless it belongs to EnvPool.
    """
    spec = gym.registry.get(env_fn.partition(":")[2] or env_fn) if isinstance(env_fn, str) else env_fn
    if not isinstance(spec, EnvSpec):
        return
    newest = find_highest_version(spec.namespace, spec.name)
    if spec.version is not None and newest is not None and newest > spec.version:
        yield f"the environment {spec.id} is out of date; consider its newest version, v{newest}"


def registered_spec(env_fn: EnvFn) -> EnvSpec | None:
    """Return the specification of a registered id in a form that can be sent to other processes; None if not needed.

    Ids of Gymnasium itself, and ids that name the module that registers them, are known in all processes.
    """
    if not isinstance(env_fn, str) or ":" in env_fn or env_fn not in gym.registry or (
            env_fn.partition("/")[0] in _NAMESPACES):
        return None
    spec = gym.registry[env_fn]
    if isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.envs."):
        return None
    if isinstance(spec.entry_point, str) and spec.entry_point.startswith("__main__:"):
        # The main module of another process is not the user's script, so the class itself is sent.
        spec = dataclasses.replace(spec, entry_point=load_env_creator(spec.entry_point))  # type: ignore[arg-type]
    return spec


def build_env(blueprint: Blueprint, spec: EnvSpec | None, index: int) -> AnyEnv:
    """Build environment `index`, with its wrappers and its own copy of `env_kwargs`."""
    where = f"{blueprint.where}, env {index}"
    build: Callable[[], AnyEnv] = functools.partial(_build_bare, blueprint, spec, where)
    if blueprint.timeout_s is not None:
        build = functools.partial(_build_timed, build, blueprint.timeout_s, where)
    env = build()
    return GuardedEnv(env, where) if blueprint.restarts is None else RestartingEnv(
        env, where, build, blueprint.restarts)


def _build_bare(blueprint: Blueprint, spec: EnvSpec | None, where: str) -> AnyEnv:
    kwargs = copy.deepcopy(blueprint.env_kwargs)
    try:
        env = _wrapped(_made(blueprint, spec, kwargs), blueprint.wrappers)
        if problem := space_problem(env):
            raise EnvError(f"{where}: {problem}")
        _give_own_spaces(env.unwrapped)
        speed_up_action_check(env.unwrapped.action_space)
        if _has_mask_method(env):
            env = MaskMethod(env, MASK_LEAF)
        if blueprint.frame_stack > 1:
            env = FrameStack(env, blueprint.frame_stack)
    except BuiltVector:
        raise
    except (PyTorchRLError, gym.error.DependencyNotInstalled, ImportError) as failure:
        raise import_problem(spec, failure) or failure from failure
    except USER_ERRORS as failure:
        reraise_of_signal(failure)
        raise EnvError(f"{where}: the constructor raised: {describe(failure)}") from failure
    return env


def _made(blueprint: Blueprint, spec: EnvSpec | None, kwargs: EnvKwargs) -> AnyEnv:
    """Build an environment with its time limit.

    Raises:
        BuiltVector: The function or id has built a vector of environments, or an environment of JAX, of which a vector
            is made.
        FactoryError: The function has built something else.
    """
    if spec is not None:
        _load_quietly(spec)
        # Gymnasium's checker would repeat the checks of GuardedEnv at every step.
        env = gym.make(spec, disable_env_checker=True, max_episode_steps=blueprint.max_episode_steps, **kwargs)
    else:
        assert callable(blueprint.env_fn)
        env = blueprint.env_fn(**kwargs)
    if is_vector(env):
        raise BuiltVector(env)
    if is_functional(env):
        raise BuiltVector(FunctionalVector(env, blueprint.num_envs, blueprint.max_episode_steps))
    if not isinstance(env, gym.Env):
        raise FactoryError(f"env_fn must return a gymnasium.Env, got {_type_name(env)} from {name_of(blueprint)}"
                           f"{_hint(env)}")
    return env if spec is not None or blueprint.max_episode_steps is None else TimeLimit(
        env, blueprint.max_episode_steps)


def _wrapped(env: AnyEnv, wrappers: Iterable[EnvWrapper]) -> AnyEnv:
    for wrapper in wrappers:
        found: object = wrapper(env)
        if not isinstance(found, gym.Env):
            env.close()
            raise FactoryError(f"wrappers must return an environment, got {_type_name(found)} from "
                               f"{getattr(wrapper, '__qualname__', repr(wrapper))}; end it with `return env`")
        env = found
    return env


def _give_own_spaces(env: AnyEnv) -> None:
    """Copy the spaces that an environment shares with all others of its class, because each seeds its own spaces."""
    for name in ("observation_space", "action_space"):
        if isinstance(inspect.getattr_static(type(env), name, None), gym.Space) and name not in vars(env):
            setattr(env, name, copy.deepcopy(getattr(env, name)))


def _has_mask_method(env: AnyEnv) -> bool:
    """Return whether only the method `action_masks()`, which sb3-contrib reads, states the allowed actions."""
    space = env.observation_space
    return not isinstance(env.action_space, gym.spaces.Box) and not (
        isinstance(space, gym.spaces.Dict) and MASK_LEAF in space.spaces) and env.has_wrapper_attr("action_masks")


def _build_timed(build: Callable[[], AnyEnv], timeout_s: float, where: str) -> AnyEnv:
    try:
        return TimedEnv(build, timeout_s)
    except TimeoutError as failure:
        raise EnvError(f"{where}: {describe(failure)}") from failure


def _type_name(value: object) -> str:
    """Return the name of a type, or of the type of a value, with its module, because several packages have an Env."""
    kind = value if inspect.isclass(value) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _hint(env: object) -> str:
    """Return a hint for the end of an error message if `env` has another API; otherwise an empty string."""
    if inspect.isclass(env):
        return f", which is a class: return an environment, {env.__name__}()"
    if hasattr(env, "agent_iter"):
        return f"; it has several agents that take turns: {TURN_BASED}"
    if hasattr(env, "possible_agents"):
        return "; it has several agents: use MultiAgentVecEnv, or train(...) with policies='shared'"
    if any(cls.__module__.partition(".")[0] == "gym" for cls in type(env).__mro__):
        return ("; the package gym was replaced by gymnasium: derive the environment from gymnasium.Env, with "
                "reset(seed, options) -> (observation, info) and step(action) -> (observation, reward, terminated, "
                "truncated, info)")
    return ""


def _load_quietly(spec: EnvSpec) -> None:
    """Import the environment's module without the deprecation warnings of Box2D and MuJoCo.

    Importing Box2D causes such warnings. If Python turns warnings into errors, these errors crash the process. MuJoCo
    3.16 prints one for each environment whose model has an older attribute, such as HalfCheetah-v5, and writes it to a
    file in the working directory.
    """
    place = spec.entry_point if isinstance(spec.entry_point, str) else ""
    if "box2d" in place:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            load_env_creator(place)
    elif place.startswith("gymnasium.envs.mujoco"):
        load_env_creator(place)
        mujoco = importlib.import_module("mujoco")
        if mujoco.get_mju_user_warning() is None:
            mujoco.set_mju_user_warning(_log_warning_of_mujoco)


def _log_warning_of_mujoco(text: str) -> None:
    if "is deprecated" not in text:
        _logger.warning("MuJoCo: %s", text)


def env_or_failure(
    maker: Callable[[], AnyEnv], observation_space: AnySpace, action_space: AnySpace,
) -> AnyEnv:
    """Build an environment; if that fails, return a stub whose reset reports the error to the parent process."""
    try:
        env = maker()
        return RememberingEnv(env) if isinstance(env, RestartingEnv) else env
    except PyTorchRLError as failure:
        return _FailedEnv(failure, observation_space, action_space)


class _FailedEnv(AnyEnv):
    def __init__(
        self, failure: PyTorchRLError, observation_space: AnySpace, action_space: AnySpace,
    ) -> None:
        self._failure = failure
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        raise self._failure


def import_problem(spec: EnvSpec | None, failure: Exception) -> ConfigError | None:
    """Return an error that explains a failed import; None for a `PyTorchRLError`, which needs no explanation."""
    if isinstance(failure, PyTorchRLError):
        return None
    name = spec.id if spec else "the environment"
    entry_point = str(spec.entry_point) if spec is not None else ""
    extra = next((name for mark, name in _EXTRAS.items() if mark in f"{entry_point} {failure}".lower()), None)
    fix = f": {install_hint(extra)}" if extra else ""
    cause = failure if isinstance(failure, ImportError) else failure.__cause__  # Gymnasium's own error has a cause
    if not isinstance(cause, ImportError) or missing_package(cause) is not None:
        return ConfigError(f"{name} needs a package that is not installed{fix} ({failure})")
    newest = _newest(spec) if spec else None
    other = f"use {newest!r}, or " if newest else ""
    return ConfigError(f"{name} cannot be imported with the packages that are installed ({cause}); {other}install "
                       f"versions that fit each other{fix}")


def _newest(spec: EnvSpec) -> str | None:
    """Return the id of the newest version of an environment, such as "Hopper-v5" for "Hopper-v3"; None if it is it."""
    newest = max((other for other in gym.registry.values() if (other.namespace, other.name) == (
        spec.namespace, spec.name)), key=lambda other: other.version or 0, default=spec)
    return newest.id if newest.id != spec.id else None


def name_of(blueprint: Blueprint) -> str:
    """Return the name of the environment as the user specified it, for error messages."""
    env_fn = blueprint.env_fn
    if isinstance(env_fn, str):
        return repr(env_fn)
    return repr(env_fn.id) if isinstance(env_fn, EnvSpec) else getattr(env_fn, "__qualname__", repr(env_fn))
