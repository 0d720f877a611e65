"""Build, seed and close vector environments.

There are three kinds: native vector environments, single environments that all run in this process, and single
environments that each run in a separate process.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import iterate

from pytorchrl.agent.env.action_checks import speed_up_action_check
from pytorchrl.agent.env.aliases import (
    Action,
    AnyEnv,
    AnyVectorEnv,
    EnvFn,
    EnvKwargs,
    EnvObject,
    EnvWrapper,
    Info,
    Observation,
)
from pytorchrl.agent.env.autoreset import INFO_KEYS, autoreset_mode_of
from pytorchrl.agent.env.guard import close_and_log, describe, seed_spaces, space_problem
from pytorchrl.agent.env.main_guard import check_main_guard
from pytorchrl.agent.env.restarts import RESTARTS, RestartingEnv, Restarts
from pytorchrl.agent.env.single import (
    Blueprint,
    BuiltVector,
    GivenVector,
    build_env,
    env_or_failure,
    find_spec,
    import_problem,
    is_vector,
    name_of,
    unwrapped,
)
from pytorchrl.agent.env.spaces import leaf_paths, part_at
from pytorchrl.errors import ConfigError, EnvError, FactoryError, FactorySerializationError, PyTorchRLError
from pytorchrl.support.tracebacks import USER_ERRORS, reraise_of_signal
from pytorchrl.support.untyped import Forwarded

VectorMaker = Callable[..., AnyVectorEnv]


class VectorSizeError(ConfigError):
    """A vector environment has another number of environments, `num_envs`, than the options say."""

    num_envs: int


# A step of Gymnasium's NumPy vector environments takes 40 us, regardless of the number of environments. A step of
# single environments takes 17 us for one environment, and 10 us more for each additional environment
# (benchmarks/env_backends.py). With at least this many environments, the NumPy vector environments are faster.
_FEWEST_FOR_NUMPY = 4
_NUMPY_VECTORS = "gymnasium.envs.classic_control."
# Vector environments in these modules return arrays of NumPy, and need not be wrapped.
_NUMPY_ONLY = (_NUMPY_VECTORS, "ale_py")

_STATEFUL_WRAPPERS = (
    gym.wrappers.NormalizeObservation, gym.wrappers.NormalizeReward, gym.wrappers.RecordVideo,
    gym.wrappers.vector.NormalizeObservation, gym.wrappers.vector.NormalizeReward)
_WRAPPER_WARNINGS = {
    "NormalizeObservation": "the wrapper NormalizeObservation has statistics of its own in each environment, which a "
                            "model does not contain, so evaluations and loaded agents begin without statistics; remove "
                            "it and set normalize_obs=True",
    "NormalizeReward": "the wrapper NormalizeReward changes the rewards that are added up to returns, also in "
                       "evaluations; remove it and set normalize_reward=True",
    "RecordVideo": "the wrapper RecordVideo counts its files from 0 in every environment, also in evaluations, "
                   "and their videos replace each other; remove it, and film the trained agent with enjoy --video",
}

_TERMINATION_S = 5.0
_ASKED_MODES = {"same_step": AutoresetMode.SAME_STEP, "next_step": AutoresetMode.NEXT_STEP}


def build_vector(blueprint: Blueprint) -> tuple[AnyVectorEnv, AutoresetMode]:
    """Build the vector environment, and return it with its autoreset mode.

    Raises:
        ConfigError: The settings do not fit the environment, or a package is missing.
        EnvError: The environment raised an exception.
    """
    if blueprint.backend == "envpool":
        from pytorchrl.agent.env.envpool import EnvPoolVector

        _check_native(blueprint)
        return EnvPoolVector(blueprint), AutoresetMode.NEXT_STEP
    spec = find_spec(blueprint.env_fn) if isinstance(blueprint.env_fn, (str, EnvSpec)) else None
    native = _native_maker(blueprint, spec)
    if native is not None and (
            blueprint.backend == "vector" or (blueprint.backend == "auto" and _native_suits(blueprint, spec, native))):
        return _build_native(blueprint, spec, native)
    mode = _ASKED_MODES.get(blueprint.autoreset, AutoresetMode.SAME_STEP)
    if native is not None and (spec is None or spec.entry_point is None):
        raise ConfigError(
            f"{name_of(blueprint)} {'takes num_envs, so it' if spec is None else 'only'} builds a vector environment: "
            f"backend={blueprint.backend!r}, "
            "frame_stack, wrappers and on_env_error='restart' need a function that builds one environment")
    try:
        envs = _build_async(blueprint, spec, mode) if blueprint.backend == "async" else _build_sync(
            blueprint, spec, mode)
    except BuiltVector as built:
        return _of_built(blueprint, built.env)
    if blueprint.backend == "vector":
        envs.close()
        raise ConfigError(
            f"backend='vector' needs a native vector environment, but {name_of(blueprint)} has none; "
            "use backend='sync' or 'async'")
    return envs, mode


def reset_vector(envs: AnyVectorEnv, seeds: list[int] | None) -> tuple[Observation, Info]:
    """Reset all environments with `seeds`; if the vector environment accepts only one seed, pass the first one."""
    if seeds is None:
        return envs.reset()
    if is_native(envs):
        seed_spaces(envs, seeds[0])
    inner = envs.unwrapped
    if isinstance(inner, (SyncVectorEnv, AsyncVectorEnv)):
        return envs.reset(seed=[*seeds])  # type: ignore[arg-type] # these accept several seeds
    if type(inner).__module__.startswith("ale_py"):
        # ALE would turn an integer into seed, seed + 1, ..., so workers with adjacent seeds would play the same games.
        return envs.reset(seed=np.array(seeds))  # type: ignore[arg-type] # ALE also accepts an array
    return envs.reset(seed=seeds[0])


def is_native(envs: AnyVectorEnv) -> bool:
    """Return whether `envs` steps all environments itself, so that no `GuardedEnv` checks the results of each."""
    return not isinstance(envs, (InProcessVectorEnv, ProcessesVectorEnv))


def device_of(envs: AnyVectorEnv) -> str | None:
    """Return the device of the tensors of a vector environment; None for the CPU, and if it has no tensors."""
    device = str(envs.find_device()) if hasattr(envs, "find_device") else "None"
    return None if device in ("None", "cpu") else device


def close_vector(envs: AnyVectorEnv, failed: bool, where: str) -> None:
    """Close all environments; exceptions are only logged.

    Args:
        envs: The environments.
        failed: Whether one of their processes has failed; all processes are then terminated without waiting for
            replies, and killed if they still run after 5 seconds.
        where: Name of the worker, for log messages.
    """
    inner = envs.unwrapped
    if failed and isinstance(inner, AsyncVectorEnv) and not getattr(envs, "is_given", False):
        for process in inner.processes:
            process.terminate()
        for process in inner.processes:
            process.join(_TERMINATION_S)
            if process.exitcode is None:  # it ignores the signal
                process.kill()
                process.join(_TERMINATION_S)
        for pipe in inner.parent_pipes:
            if pipe is not None:
                pipe.close()
        inner.closed = True
        return
    close_and_log(envs.close, where)


def _build_native(
    blueprint: Blueprint, spec: EnvSpec | None, native: VectorMaker,
) -> tuple[AnyVectorEnv, AutoresetMode]:
    _check_native(blueprint)
    accepted = _parameters(native)
    kwargs = copy.deepcopy(blueprint.env_kwargs)
    if "autoreset_mode" in accepted:
        kwargs.setdefault("autoreset_mode", _ASKED_MODES.get(blueprint.autoreset, AutoresetMode.SAME_STEP))
    if "num_threads" in accepted:
        kwargs.setdefault("num_threads", blueprint.num_threads)
    if "reward_clipping" in accepted:
        # Statistics need raw rewards, and `info` does not contain them, so the environment must not clip rewards.
        kwargs.setdefault("reward_clipping", False)
    if blueprint.max_episode_steps is not None:
        kwargs |= _time_limit(blueprint, spec, accepted)
    try:
        if spec is not None:
            entry = gym.VectorizeMode.VECTOR_ENTRY_POINT
            envs = gym.make_vec(spec, num_envs=blueprint.num_envs, vectorization_mode=entry, **kwargs)
        else:
            envs = native(num_envs=blueprint.num_envs, **kwargs)
    except (PyTorchRLError, gym.error.DependencyNotInstalled, ImportError) as failure:
        raise import_problem(spec, failure) or failure from failure
    except USER_ERRORS as failure:
        reraise_of_signal(failure)
        raise EnvError(f"{blueprint.where}: the constructor raised: {describe(failure)}") from failure
    return _checked_native(blueprint, envs, kwargs.get("autoreset_mode"))


def _checked_native(
    blueprint: Blueprint, built: EnvObject, mode: AutoresetMode | str | None,
) -> tuple[AnyVectorEnv, AutoresetMode]:
    """Return a native vector environment, in the form of Gymnasium and with arrays of NumPy, and its autoreset mode.

    Args:
        blueprint: The settings.
        built: An object that steps all environments at once.
        mode: The autoreset mode that was requested; None if the object determines it.

    Raises:
        FactoryError: The object is no vector of environments.
        VectorSizeError: The number of environments differs from the requested one.
    """
    envs = _as_vector(blueprint, built)
    if envs.num_envs != blueprint.num_envs:
        failure = VectorSizeError(
            f"vec_env_size={blueprint.num_envs}, but {name_of(blueprint)} has {envs.num_envs} environments; set "
            f"{envs.num_envs}, or leave vec_env_size out (with train, num_envs)")
        failure.num_envs = envs.num_envs
        if not isinstance(blueprint.env_fn, GivenVector):
            envs.close()
        raise failure
    _check_spaces(envs, blueprint.where)
    # The argument is more reliable than the metadata, because classes may share one metadata dictionary.
    mode = autoreset_mode_of(envs) if mode is None else AutoresetMode(mode)
    if mode is not _ASKED_MODES.get(blueprint.autoreset, mode):
        envs.close()
        raise ConfigError(
            f"autoreset={blueprint.autoreset!r}, but {name_of(blueprint)} supports only {mode.value}; "
            "use backend='sync'")
    speed_up_action_check(envs.unwrapped.action_space)
    is_given = isinstance(blueprint.env_fn, GivenVector)
    returns_arrays = isinstance(envs, (SyncVectorEnv, AsyncVectorEnv)) or type(
        envs.unwrapped).__module__.startswith(_NUMPY_ONLY)
    if is_given or not returns_arrays:
        from pytorchrl.agent.env.tensors.host import HostVector

        envs = HostVector(envs, blueprint.where, type(unwrapped(built)).__name__, mode, is_given=is_given)
    return envs, mode


def _as_vector(blueprint: Blueprint, built: EnvObject) -> AnyVectorEnv:
    """Return an object that steps all environments at once in the form of Gymnasium's vector environments."""
    if not is_vector(built):
        raise FactoryError(
            "env_fn takes num_envs, so it must return a gymnasium.vector.VectorEnv of that size, or an object with "
            f"num_envs, reset and step; {name_of(blueprint)} returned {built}")
    layer = built
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer, gym.wrappers.TimeLimit):
            raise ConfigError(
                f"Gymnasium's TimeLimit counts the steps of one environment, but {name_of(blueprint)} is a vector of "
                "environments; register the id without max_episode_steps, and set the environments' own limit")
        layer = layer.env
    if isinstance(built, VectorEnv):
        return built
    from pytorchrl.agent.env.tensors.objects import ObjectVector  # imports torch

    try:
        return ObjectVector(built, blueprint.truncation)
    except PyTorchRLError:
        raise
    except USER_ERRORS as failure:
        reraise_of_signal(failure)
        raise EnvError(f"{blueprint.where}: reset raised: {describe(failure)}") from failure


def _check_spaces(envs: AnyVectorEnv, where: str) -> None:
    """Raise `EnvError` if a space (single or batched) of a native vector environment is missing or has a wrong type."""
    names = ("single_observation_space", "single_action_space", "observation_space", "action_space")
    if problem := space_problem(envs, names):
        raise EnvError(f"{where}: {problem}")


def wrapper_warnings(envs: AnyVectorEnv) -> list[str]:
    """Return a warning for each of Gymnasium's wrappers in `envs` that gives wrong scores or overwrites files."""
    kinds: set[str] = set()
    for outermost in (envs, *(getattr(envs.unwrapped, "envs", None) or ())[:1]):
        env: object = outermost
        while isinstance(env, (gym.Wrapper, gym.vector.VectorWrapper)):
            kinds.update(kind.__name__ for kind in _STATEFUL_WRAPPERS if isinstance(env, kind))
            env = env.env
    return [_WRAPPER_WARNINGS[name] for name in sorted(kinds)]


def _of_built(blueprint: Blueprint, built: EnvObject) -> tuple[AnyVectorEnv, AutoresetMode]:
    """Return the vector environment that a function or an id without `num_envs` has built; see `_checked_native`.

    Raises:
        ConfigError: An option needs single environments.
    """
    from pytorchrl.agent.env.tensors.jax import FunctionalVector

    _check_native(blueprint)
    name = name_of(blueprint)
    if blueprint.backend not in ("auto", "vector"):
        raise ConfigError(f"backend={blueprint.backend!r} needs single environments, but {name} builds a vector of "
                          "environments; leave backend out, or give a function that builds one environment")
    if blueprint.max_episode_steps is not None and not isinstance(built, FunctionalVector):
        raise ConfigError(f"{name} builds a vector of environments, which does not support max_episode_steps; set its "
                          "own limit, and return the episodes that it cuts off as truncated")
    return _checked_native(blueprint, built, None)


def _build_sync(blueprint: Blueprint, spec: EnvSpec | None, mode: AutoresetMode) -> AnyVectorEnv:
    makers = [functools.partial(build_env, blueprint, spec, index) for index in range(blueprint.num_envs)]
    try:
        envs = InProcessVectorEnv(makers, copy=False, autoreset_mode=mode)
    except RuntimeError as failure:  # the spaces of the environments differ
        raise EnvError(f"{blueprint.where}: {describe(failure)}") from failure
    envs.info_keys = INFO_KEYS
    return envs


def _build_async(blueprint: Blueprint, spec: EnvSpec | None, mode: AutoresetMode) -> AnyVectorEnv:
    check_main_guard("backend='async'")
    restarts = blueprint.restarts
    if restarts is not None:  # each process counts its own restarts; `restarts` counts the restarts of all processes
        blueprint = dataclasses.replace(
            blueprint, restarts=Restarts(restarts.limit, logs=False, from_start=restarts.from_start))
    makers = [functools.partial(build_env, blueprint, spec, index) for index in range(blueprint.num_envs)]
    first = makers[0]()
    observation_space, action_space = first.observation_space, first.action_space
    first.close()
    makers = [functools.partial(env_or_failure, maker, observation_space, action_space) for maker in makers]
    try:
        # The processes are spawned, because forking a process with threads may deadlock, and torch starts threads.
        envs = ProcessesVectorEnv(makers, copy=False, context="spawn", autoreset_mode=mode)
    except (RuntimeError, ValueError, OSError, EOFError) as failure:
        raise EnvError(
            f"{blueprint.where}: could not start the environments' processes: {describe(failure)}") from failure
    envs.restarts = restarts
    return envs


def check_can_be_sent(env_fn: EnvFn, env_kwargs: EnvKwargs, wrappers: Sequence[EnvWrapper]) -> None:
    """Raise `FactorySerializationError` if the processes of backend='async' cannot receive what builds environments."""
    for name, value in {"env_fn": env_fn, **{f"env_kwargs[{key!r}]": value for key, value in env_kwargs.items()},
                        "wrappers": tuple(wrappers)}.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:  # noqa: PERF203 - there are few entries, and the error names one
            raise FactorySerializationError(
                f"{name} cannot be sent to the processes of backend='async' ({describe(error)}); create locks, open "
                "files and GPU tensors inside the function that builds an environment, not outside, or use "
                "backend='sync'") from error


def _native_maker(blueprint: Blueprint, spec: EnvSpec | None) -> VectorMaker | None:
    """Return the function that builds the native vector environment; None if there is none."""
    if spec is None:
        maker = blueprint.env_fn
        return maker if callable(maker) and "num_envs" in _parameters(maker) else None
    entry_point = spec.vector_entry_point
    if entry_point is None or callable(entry_point):
        return entry_point
    try:
        return load_env_creator(entry_point)  # type: ignore[return-value] # it builds a vector environment
    except ImportError as failure:
        if blueprint.backend == "auto":  # single environments may not need the missing package, such as JAX
            return None
        raise import_problem(spec, failure) or failure from failure


def _native_suits(blueprint: Blueprint, spec: EnvSpec | None, native: VectorMaker | None) -> bool:
    """Return whether "auto" chooses the native vector environment: only if it supports the options and is faster."""
    if native is None or blueprint.frame_stack > 1 or blueprint.wrappers or blueprint.needs_restarts:
        return False
    if blueprint.timeout_s is not None:
        return False
    if spec is not None and native.__module__.startswith(_NUMPY_VECTORS) and blueprint.num_envs < _FEWEST_FOR_NUMPY:
        return False
    if spec is None or spec.entry_point is None:
        return True
    accepted = _parameters(native)
    return blueprint.autoreset != "same_step" or "autoreset_mode" in accepted


def _time_limit(blueprint: Blueprint, spec: EnvSpec | None, accepted: set[str]) -> dict[str, int]:
    """Return the keyword argument that sets `max_episode_steps` in the native vector environment."""
    assert blueprint.max_episode_steps is not None
    if "max_episode_steps" in accepted:
        return {"max_episode_steps": blueprint.max_episode_steps}
    if "max_num_frames_per_episode" in accepted:
        known = ({} if spec is None else spec.kwargs) | blueprint.env_kwargs
        return {"max_num_frames_per_episode": blueprint.max_episode_steps * known.get("frameskip", 4)}
    raise ConfigError(f"{name_of(blueprint)} does not support max_episode_steps; use backend='sync'")


def _check_native(blueprint: Blueprint) -> None:
    """Raise `ConfigError` for settings that a native vector environment does not support."""
    if blueprint.needs_restarts:
        raise ConfigError(
            f"on_env_error='restart' needs single environments, but {name_of(blueprint)} is one vector environment, "
            "whose environments cannot be replaced one by one; use backend='sync' or 'async', give a function that "
            "builds one environment, or set on_env_error='raise'")
    if blueprint.timeout_s is not None:
        raise ConfigError(
            f"env_timeout_s={blueprint.timeout_s:g} needs single environments, but {name_of(blueprint)} is one vector "
            "environment, which steps all environments in one call; use backend='sync' or 'async', or give a function "
            "that builds one environment")
    if blueprint.frame_stack > 1 or blueprint.wrappers:
        raise ConfigError(
            f"frame_stack={blueprint.frame_stack} and {len(blueprint.wrappers)} wrappers need single environments, "
            f"but {name_of(blueprint)} is one vector environment; use backend='sync' or 'async', or give a function "
            "that builds one environment")


def _parameters(function: Callable[..., object]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return set()


class InProcessVectorEnv(SyncVectorEnv):
    """A faster `SyncVectorEnv`.

    In SAME_STEP mode, the overhead of a step is a third of Gymnasium's for observations that are arrays, and two thirds
    for others.

    Attributes:
        info_keys: Keys of `info` that `step` returns; None means all keys. `final_info` always contains all keys.
            Fewer keys save time: returning all four keys of a MuJoCo environment doubles the overhead of a step.
        no_end: (E,) bool, all False. If no episode ends in a step, `step` returns this array as `terminations` and as
            `truncations`.
    """

    info_keys: tuple[str, ...] | None = None

    def __init__(self, makers: Sequence[Callable[[], AnyEnv]], **settings: Forwarded) -> None:
        super().__init__(makers, **settings)
        self.no_end = np.zeros(self.num_envs, dtype=np.bool_)
        self._parts = None if isinstance(self._observations, np.ndarray) else [
            (path, part_at(self._observations, path)) for path in leaf_paths(self.single_observation_space)]
        for index, env in enumerate(self.envs):
            if isinstance(env, RestartingEnv):
                env.last_observation = functools.partial(self._last_observation, index)

    def step(self, actions: Action) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray, Info]:
        """Step all environments; the next step overwrites the returned observations and rewards."""
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            return super().step(actions)
        rewards, terminations, truncations = self._rewards, self._terminations, self._truncations
        infos: Info = {}
        has_end = False
        for index, env in enumerate(self.envs):
            observation, rewards[index], terminated, truncated, info = env.step(actions[index])
            if terminated or truncated:
                has_end = True
                infos = self._add_info(infos, {"final_obs": observation, "final_info": info}, index)
                observation, info = env.reset()
            if self._parts is None:
                self._observations[index] = observation
            else:
                for path, array in self._parts:
                    array[index] = part_at(observation, path)
            terminations[index], truncations[index] = terminated, truncated
            if info and self.info_keys is not None:
                info = {key: info[key] for key in self.info_keys if key in info}
            if info:
                infos = self._add_info(infos, info, index)
        if not has_end:
            return self._observations, rewards, self.no_end, self.no_end, infos
        return self._observations, rewards, terminations.copy(), truncations.copy(), infos

    def _last_observation(self, index: int) -> Observation:
        """Return a copy of the latest observation of environment `index`.

        `RestartingEnv` returns this copy as the observation of a step that raises.
        """
        rows = iterate(self.observation_space, self._observations)
        return copy.deepcopy(next(itertools.islice(rows, index, None)))


class ProcessesVectorEnv(AsyncVectorEnv):
    """Gymnasium's `AsyncVectorEnv` (one process per environment) with restarts and complete error messages."""

    restarts: Restarts | None = None
    """Restart budget shared by all environments; None if restarts are off."""

    def _add_info(self, vector_infos: Info, env_info: Info, env_num: int) -> Info:
        """Count the restarts reported in `env_info`, remove the report, and add `env_info` to `vector_infos`."""
        if self.restarts is not None:
            for fault in env_info.pop(RESTARTS, ()):
                self.restarts.spend(fault, None)
        return super()._add_info(vector_infos, env_info, env_num)

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        """If environments failed, raise `EnvError` with the error of the first one and the number of other failures."""
        num_failed = sum(not success for success in successes)
        if num_failed:
            reports = sorted((self.error_queue.get() for _ in range(num_failed)), key=lambda report: report[0])
            more = f"; number of other environments that failed: {num_failed - 1}" if num_failed > 1 else ""
            _, kind, failure, trace = reports[0]
            raise EnvError(f"{failure if issubclass(kind, EnvError) else describe(failure)}{more}") from RuntimeError(
                f"in the environment's process:\n{trace}")
