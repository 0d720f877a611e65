"""`VecEnv`: E environments that are stepped together, with the same behavior for all backends."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from pytorchrl.agent.data import OBS_LEAF, Arrays, Step
from pytorchrl.agent.env.aliases import AnySpace, EnvFn, EnvKwargs, Info, Observation
from pytorchrl.agent.env.autoreset import NO_INDEX, make_autoreset
from pytorchrl.agent.env.backends import (
    InProcessVectorEnv,
    VectorSizeError,
    build_vector,
    check_can_be_sent,
    close_vector,
    device_of,
    is_native,
    reset_vector,
    wrapper_warnings,
)
from pytorchrl.agent.env.common import (
    CommonEnvOptions,
    env_seeds,
    is_large,
    is_training_mode,
    open_monitor,
    reward_function,
)
from pytorchrl.agent.env.guard import VectorResults, describe
from pytorchrl.agent.env.masks import ActionMasks
from pytorchrl.agent.env.restarts import Restarts, cut_in
from pytorchrl.agent.env.single import (
    Blueprint,
    GivenEnv,
    GivenFunctional,
    GivenVector,
    is_vector,
    registered_spec,
    version_warnings,
)
from pytorchrl.agent.env.spaces import ObservationReader, RawSpaces, action_start, flatten_action_space
from pytorchrl.agent.env.statistics import APPROXIMATED, EpisodeStatistics, Monitor
from pytorchrl.agent.env.tensors.jax import is_functional
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import Factory, Part, build_options, option
from pytorchrl.errors import CallOrderError, ConfigError, EnvError, NonFiniteDataError, Problem, StoppedError
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.threads import State
from pytorchrl.support.tracebacks import USER_ERRORS, brief_errors, reraise_of_signal
from pytorchrl.support.untyped import OptionValue
from pytorchrl.support.worker_names import collection_worker

if TYPE_CHECKING:
    from typing_extensions import Self

logger = get_logger(__name__)

# Default of max_env_restarts: environments that need more restarts within 1000 vector steps are considered broken.
_MAX_RESTARTS = 3
# `step` compares with this constant, because Python 3.11 needs 0.2 us to look up a member of an enum.
_RUNNING = State.RUNNING


class VecEnv(Part):
    """E environments, stepped together.

    Args:
        options: Checked options; see `VecEnv.Options`.
        index_grad_worker: Index of the gradient worker.
        index_col_worker: Index of the collection worker among the collection workers of that gradient worker. Both
            indices determine the seeds and the name of the monitor file.
        mode: "train" or "test". In "test" mode, rewards are raw, the loss of a life does not end an episode,
            `test_env_kwargs` apply, and the seeds differ from those of training.
        seed: Seed of the experiment; None draws a random seed.
        num_threads: Number of threads that a native vector environment may use.
        incarnation: Number of earlier workers with the same indices; the seeds depend on this number.

    Attributes:
        num_envs: E, the number of environments.
        vector: The Gymnasium vector environment that steps the environments.
        seeds: Seed of each environment.
        observation_space: The space of each leaf of an environment's observations, as returned by `flatten_space`.
        action_space: Action space of one environment; discrete actions count from 0.
        action_shape: Shape of the actions of all environments, (E, ...).
        autoreset_mode: The autoreset mode of `vector`.

    Raises:
        ConfigError: The options do not fit the environment.
        EnvError: An environment could not be built.
    """

    home: ClassVar[str] = "environments"

    @dataclass(frozen=True, kw_only=True)
    class Options(CommonEnvOptions):
        """Settings of a `VecEnv`."""

        env_fn: OptionValue = option(  # `EnvFn`, checked below
            help="A Gymnasium id, an EnvSpec, or a function that takes keyword arguments and builds one environment, "
            "an environment of JAX, or, mostly with the argument num_envs, a vector of environments. One worker also "
            "accepts an environment or a vector of environments.")
        backend: str = option(
            "auto", help="Method of stepping the environments. auto uses the native vector environment if one exists, "
            "else sync. For fewer than 4 of Gymnasium's classic control environments (such as CartPole), auto uses "
            "sync, which is faster.",
            choices=("auto", "vector", "sync", "async", "envpool"))
        autoreset: str = option(
            "auto", help="When a new episode starts: same_step in the step that ends the previous episode, next_step "
            "in the step after it. auto uses same_step if the environment supports it, else next_step.",
            choices=("auto", "same_step", "next_step"))
        truncation: str = option(
            "exact", help="Value after an episode that was cut off, for a vector environment that returns the first "
            "observation of the next episode and not the last one: exact refuses such an end; approximate takes the "
            "observation before the last step instead.", choices=("exact", "approximate"))
        frame_stack: int = option(1, help="Number of most recent observations concatenated into one.", low=1)
        end_on_life_loss: bool = option(
            False, help="Whether a decrease of info['lives'] is a termination for learners; the game continues.")
        on_env_error: str = option(
            "auto", help="Reaction to an exception in one environment: restart replaces the environment and truncates "
            "its episode; raise ends the run. auto means raise for native vector environments; for others, an "
            "exception before the end of an environment's first episode (at most 1000 steps) ends the run, and later "
            "ones restart.",
            choices=("auto", "restart", "raise"))
        max_env_restarts: int = option(
            _MAX_RESTARTS, help="Maximum number of restarts of one worker's environments within 1000 steps of the "
            "worker; needs on_env_error='restart'.", low=1)
        env_timeout_s: float | None = option(
            None, help="Longest time of one step or reset of an environment, in seconds. A call that takes longer is "
            "an error of the environment (see on_env_error). Each environment then runs in a thread. None: no limit.",
            low=0.0, exclusive=True)
        keep_float64: bool | None = option(
            None, help="Whether float64 observations stay float64, which doubles their memory. None keeps float64 if "
            "the first observation contains a value above 131072, where float32 has at most six binary places.")
        info_keywords: tuple[str, ...] = option(
            (), help="Entries of an episode's last info that are written to the CSV file.")

        def __post_init__(self) -> None:
            """Check each field and the combinations of fields."""
            if is_vector(self.env_fn):
                object.__setattr__(self, "env_fn", GivenVector(self.env_fn))
            elif isinstance(self.env_fn, gym.Env):
                object.__setattr__(self, "env_fn", GivenEnv(self.env_fn))
            elif is_functional(self.env_fn):
                object.__setattr__(self, "env_fn", GivenFunctional(self.env_fn))
            super().__post_init__()
            if not (isinstance(self.env_fn, (str, EnvSpec)) or callable(self.env_fn)):
                raise ConfigError(
                    f"env_fn must be a Gymnasium id, an EnvSpec, a function or a gymnasium.Env, got {self.env_fn!r}")
            if clash := set(self.info_keywords) & set(Monitor.COLUMNS):
                raise ConfigError(
                    f"info_keywords must differ from the columns {list(Monitor.COLUMNS)}, got {sorted(clash)}")

        def contradictions(self) -> Iterator[Problem]:
            """Refuse a number of restarts if environments are not restarted, and several uses of one environment."""
            yield from super().contradictions()
            if isinstance(self.env_fn, GivenEnv):
                is_one = not isinstance(self.env_fn, GivenVector)
                for name, allowed in ((("vec_env_size", (1,)), ("backend", ("auto", "sync"))) if is_one else (
                        ("backend", ("auto", "vector")),)):
                    if (value := getattr(self, name)) not in allowed:
                        yield Problem(f"{name} must be {' or '.join(map(repr, allowed))} for an environment that is "
                                      f"given as an object, got {value!r}", self.env_fn.remedy, (name,))
            if self.max_env_restarts != _MAX_RESTARTS and self.on_env_error != "restart":
                yield Problem(
                    f"max_env_restarts={self.max_env_restarts} needs on_env_error='restart', got {self.on_env_error!r}",
                    options=("max_env_restarts", "on_env_error"))

    @classmethod
    @brief_errors
    @checked_names
    def create_factory(
        cls, env_fn: EnvFn, env_kwargs: EnvKwargs | None = None, vec_env_size: int = Options.vec_env_size,
        **options: OptionValue,
    ) -> EnvFactory:
        """Return a factory of `VecEnv` objects; build and close one environment to find its spaces.

        Args:
            env_fn: A Gymnasium id, an EnvSpec, or a function that takes keyword arguments.
            env_kwargs: Keyword arguments of the environments.
            vec_env_size: E, the number of environments.
            options: Further fields of `VecEnv.Options`.

        Raises:
            ConfigError: An option is invalid, the id is unknown (the message names similar ids), or a package is
                missing (the message names the extra).
            EnvError: The environment raises an exception, or violates Gymnasium's API, when it is built or reset.
        """
        kwargs = dict(env_kwargs) if isinstance(env_kwargs, Mapping) else env_kwargs or {}
        built = build_options(cls, {"env_fn": env_fn, "env_kwargs": kwargs, "vec_env_size": vec_env_size, **options})
        has_own_size = False
        try:
            probe, obs = cls._probe(built)
        except VectorSizeError as failure:  # the environments themselves determine their number
            if vec_env_size == 1:  # the default
                built = dataclasses.replace(built, vec_env_size=failure.num_envs)
            probe, obs = cls._probe(built, size=built.vec_env_size)
            has_own_size = True
        if built.keep_float64 is None and any(map(is_large, obs.values())):
            wide = dataclasses.replace(built, keep_float64=True)
            found, obs = cls._probe(wide)
            if any(leaf.dtype == np.float64 and is_large(leaf) for leaf in obs.values()):
                built, probe = wide, found
        for text in (*wrapper_warnings(probe.vector), *version_warnings(built.env_fn)):
            logger.warning("%s", text)
        return EnvFactory(cls, built, observation_space=probe.observation_space, action_space=probe.action_space,
                          raw_spaces=probe.raw_spaces, spec=registered_spec(built.env_fn), has_own_size=has_own_size,
                          device=device_of(probe.vector), autoreset_mode=probe.autoreset_mode)

    @classmethod
    def _probe(cls, options: Options, size: int = 1) -> tuple[Self, Arrays]:
        """Build and close a vectorized environment in this process; return it and its first observations."""
        backend = options.backend
        if backend == "async":
            check_can_be_sent(options.env_fn, options.env_kwargs, options.wrappers)
            backend = "sync"
        probe = cls(dataclasses.replace(options, vec_env_size=size, log_dir=None, backend=backend), seed=0)
        try:
            return probe, probe.reset()[0]
        finally:
            probe.close()

    def __init__(
        self,
        options: Options,
        *,
        index_grad_worker: int = 0,
        index_col_worker: int = 0,
        mode: str = "train",
        seed: int | None = None,
        num_threads: int = 1,
        incarnation: int = 0,
    ) -> None:
        is_training = is_training_mode(mode)
        self.num_envs = options.vec_env_size
        self._where = collection_worker(index_grad_worker, index_col_worker)
        self._seeds_of = functools.partial(
            env_seeds, is_training=is_training, path=(index_grad_worker, index_col_worker, incarnation),
            num_envs=self.num_envs)
        self.seeds = self._seeds_of(seed)
        self._state = State.NEW
        self._failed = False  # whether `close` must not wait for replies of the environments' processes
        self._num_steps = 0
        self._restarts = Restarts(  # an evaluation is not ended by its first episodes, because training has begun
            options.max_env_restarts, lambda: self._num_steps,
            from_start=options.on_env_error == "restart" or not is_training)
        self.vector, self.autoreset_mode = build_vector(Blueprint(
            env_fn=options.env_fn, env_kwargs=options.env_kwargs | ({} if is_training else options.test_env_kwargs),
            num_envs=self.num_envs, backend=options.backend, autoreset=options.autoreset, truncation=options.truncation,
            max_episode_steps=options.max_episode_steps, frame_stack=options.frame_stack, wrappers=options.wrappers,
            num_threads=num_threads, seeds=self.seeds, where=self._where,
            restarts=None if options.on_env_error == "raise" else self._restarts, timeout_s=options.env_timeout_s,
            needs_restarts=options.on_env_error == "restart"))
        single_action_space = self.vector.single_action_space
        self._reader = ObservationReader(self.vector.single_observation_space, bool(options.keep_float64))
        self.observation_space = self._reader.space
        self._values = self._reader.value_check()
        self.action_space = flatten_action_space(single_action_space)
        self._action_start = action_start(single_action_space)
        self.action_shape = (self.num_envs, *(single_action_space.shape or ()))
        self._action_dtype = single_action_space.dtype
        self._is_continuous = self._action_dtype is not None and self._action_dtype.kind == "f"
        # Environments may change arrays of actions, but stored actions must not change. Continuous actions are copies
        # of the stored ones, and single environments receive Discrete actions as scalars.
        self._copies_action = not self._is_continuous and not (
            isinstance(self.vector, InProcessVectorEnv) and len(self.action_shape) == 1)
        self._autoreset = make_autoreset(self.autoreset_mode, self._reader, self.vector)
        self._transform = reward_function(options.reward_transform if is_training else None)
        self._statistics = EpisodeStatistics(self.num_envs, open_monitor(
            options.log_dir, mode, index_grad_worker, index_col_worker, options.info_keywords))
        self._masks = ActionMasks(
            self._reader, self.num_envs, self._where, self.autoreset_mode is AutoresetMode.NEXT_STEP,
            self.action_space)
        self._ends_on_life_loss = options.end_on_life_loss and is_training
        self._lives: np.ndarray | None = None
        # Results of single environments are checked one by one by `GuardedEnv`.
        self._results = VectorResults(self.vector) if is_native(self.vector) else None
        # These arrays are never written to, so all steps in which no episode ends can return them.
        self._all = np.ones(self.num_envs, dtype=np.bool_)
        self._none = self.vector.no_end if isinstance(self.vector, InProcessVectorEnv) else ~self._all

    @property
    def raw_spaces(self) -> RawSpaces | Mapping[str, RawSpaces]:
        """The spaces of one environment before they are flattened; known only after the first reset."""
        return RawSpaces(self.vector.single_observation_space, self.vector.single_action_space,
                         self._reader.keep_float64, self._masks.is_in_info)

    @property
    def num_restarts(self) -> int:
        """Number of times that an environment was replaced because it raised an exception."""
        return self._restarts.total

    def reset(self) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Start new episodes in all environments, and discard the running episodes.

        The first call seeds the environments; later calls do not seed them again.

        Returns:
            The observations, one array (E, ...) for each leaf, and the mask of allowed actions, (E, n) bool; the mask
            is None if the environment has no masks.

        Raises:
            EnvError: An environment raised an exception or violated Gymnasium's API.
            StoppedError: The environments are closed.
        """
        if self._state is State.STOPPED:
            self._refuse("reset")
        seeds = self.seeds if self._state is State.NEW else None
        try:
            observations, info = reset_vector(self.vector, seeds)
            if self._results is not None:
                observations = self._results.of_reset(observations, info)
        except USER_ERRORS as failure:
            self._fail("reset", failure)
        if self._state is State.NEW:
            self._reader.adapt(observations)
            self._state = State.RUNNING
        self._autoreset.reset()
        self._statistics.reset()
        self._lives = self._lives_in(info)
        obs = self._reader.read(observations)
        if problem := self._values.problem(obs):
            raise EnvError(f"{self._where}, {problem}")
        return obs, self._masks.reset(observations, info)

    def reseed(self, seed: int) -> None:
        """Make the next `reset` use the seeds that new environments would derive from `seed`."""
        if self._state is State.STOPPED:
            self._refuse("reseed")
        self.seeds, self._state = self._seeds_of(seed), State.NEW

    def step(self, action: np.ndarray) -> Step:
        """Take one step in every environment.

        Args:
            action: (E, ...); continuous actions are float32, and other actions are int64 and count from 0.

        Raises:
            EnvError: An environment raised an exception, or `action` has the wrong shape.
            NonFiniteDataError: An action contains NaN or infinity.
            CallOrderError: `reset` has not been called.
            StoppedError: The environments are closed.
        """
        if self._state is not _RUNNING:
            self._refuse("step")
        try:
            observations, reward, terminated, truncated, info = result = self.vector.step(self._outgoing(action))
            if self._results is not None:
                observations, reward, terminated, truncated = self._results.of_step(result)
                if self._num_steps == 0:
                    self._reader.adapt(observations)
        except USER_ERRORS as failure:
            self._fail("step", failure)
        self._num_steps += 1
        is_special = self._autoreset.pending or self._lives is not None
        if is_special or terminated is not self._none or truncated is not self._none:
            done = terminated | truncated
            if is_special or np.count_nonzero(done):
                return self._resolve(done, observations, reward, terminated, truncated, info)
        self._statistics.add(reward)
        if self._transform is not None:
            reward = self._transform(reward)
        obs = {OBS_LEAF: observations} if self._reader.is_plain else self._reader.read(observations)
        if self._num_steps >= self._values.due:
            self._check_values(obs)
        return Step(
            obs, reward if reward.dtype == np.float32 else reward.astype(np.float32),
            terminated, truncated, self._all, self._none, NO_INDEX, {},
            self._masks.read(observations, info), [])

    def close(self) -> None:
        """Close environments, processes and the monitor file; further calls have no effect."""
        if self._state is State.STOPPED:
            return
        self._state = State.STOPPED
        self._statistics.close()
        close_vector(self.vector, self._failed, self._where)

    def _resolve(
        self, done: np.ndarray, observations: Observation, reward: np.ndarray, terminated: np.ndarray,
        truncated: np.ndarray, info: Info,
    ) -> Step:
        """Return the result of a step in which an episode may have ended or begun; `step` handles all other steps."""
        if self._autoreset.pending or np.count_nonzero(done):
            if self.autoreset_mode is AutoresetMode.DISABLED:
                # The reset that follows may overwrite the results of the step.
                reward, terminated, truncated = reward.copy(), terminated.copy(), truncated.copy()
            try:
                resolved = self._autoreset.resolve(done, observations, info)
            except USER_ERRORS as failure:
                self._fail("reset", failure)
            cut = cut_in(info)
            observations, info, valid, first, final_index, final_obs, last_info_of, final_mask = resolved
            final_mask = self._masks.final(final_mask, final_index, last_info_of)
            if cut is not None:
                valid = ~cut if valid is None else valid & ~cut
                self._statistics.discard(cut)
                info = self._completed(info, cut)
            self._statistics.add(reward, valid)
            episodes = self._statistics.finish(
                done if cut is None else done & ~cut, terminated, last_info_of, info.get(APPROXIMATED))
            truncated = truncated & ~terminated
        else:
            valid, first, final_index, final_obs, final_mask, episodes = None, self._none, NO_INDEX, {}, None, []
            self._statistics.add(reward)
        if self._lives is not None:
            lives = self._lives_in(info, done)
            lost = (lives < self._lives) & ~done
            if valid is not None:
                lost &= valid
            self._lives = lives
            if np.count_nonzero(lost):
                terminated, first = terminated | lost, first | lost
        if self._transform is not None:
            reward = self._transform(reward)
        obs = self._reader.read(observations)
        if self._num_steps >= self._values.due:
            self._check_values(obs, final_obs)
        return Step(
            obs, reward.astype(np.float32, copy=False), terminated, truncated,
            self._all if valid is None else valid, first, final_index, final_obs,
            self._masks.read_at_end(observations, info, done, truncated), episodes, final_mask)

    def _completed(self, info: Info, cut: np.ndarray) -> Info:
        """Return `info` with lives and action masks for the environments that raised exceptions (`cut`, (E,) bool).

        In NEXT_STEP mode, these environments are reset in the next step. Until then, their numbers of lives stay the
        same, and their masks allow all actions. In other modes, these environments have already been reset, and `info`
        contains their lives and masks.
        """
        if self.autoreset_mode is not AutoresetMode.NEXT_STEP:
            return info
        info = dict(info)
        if self._lives is not None:
            info["_lives"] = cut | info.get("_lives", np.full_like(cut, "lives" in info))
            info["lives"] = np.where(cut, self._lives, info.get("lives", self._lives))
        self._masks.complete(info, cut)
        return info

    def _outgoing(self, action: np.ndarray) -> np.ndarray:
        """Return the actions in the form that the environments expect."""
        if action.shape != self.action_shape:
            raise EnvError(f"{self._where}: expected actions of shape {self.action_shape}, got {action.shape}")
        if self._is_continuous and not math.isfinite(np.add.reduce(action, None)):
            bad = np.flatnonzero(~np.isfinite(action.reshape(self.num_envs, -1)).all(axis=1)).tolist()
            if bad:
                raise NonFiniteDataError(
                    f"{self._where}, step {self._num_steps}: NaN or infinity in the actions of environments {bad}")
        if self._action_start is not None:
            action = action + self._action_start
        elif self._copies_action:
            action = action.copy()
        return action if action.dtype == self._action_dtype else action.astype(self._action_dtype)

    def _lives_in(self, info: Info, ended: np.ndarray | None = None) -> np.ndarray | None:
        """Return the lives (E,) in `info`; the `info` of a step in which an episode `ended`, (E,) bool, may lack them.

        Raises:
            EnvError: The `info` of an environment lacks lives.
        """
        if not self._ends_on_life_loss:
            return None
        given = info.get("_lives", self._all) if "lives" in info else ~self._all
        lacking = ~given if ended is None else ~given & ~ended
        if np.count_nonzero(lacking):
            raise EnvError(
                f"{self._where}, step {self._num_steps}: end_on_life_loss needs info['lives'] in every reset and step, "
                f"but environments {np.flatnonzero(lacking).tolist()} returned info with {sorted(info)}; return it, or "
                "set end_on_life_loss=False")
        return np.where(given, info.get("lives", 0), 0 if self._lives is None else self._lives)

    def _check_values(self, obs: Arrays, final_obs: Arrays | None = None) -> None:
        """Raise `EnvError` if a category or flag of a step is outside its space; see `ValueCheck`."""
        problem = self._values.check(obs, self._num_steps)
        if problem is None and final_obs:
            problem = self._values.problem(final_obs)
        if problem:
            raise EnvError(f"{self._where}, {problem}")

    def _refuse(self, call: str) -> NoReturn:
        """Raise an error, because the environments are closed or because `reset` has not been called."""
        if self._state is State.STOPPED:
            raise StoppedError(f"{self._where}: {call}() was called after close(); build new environments by calling "
                               "their factory")
        raise CallOrderError(f"{self._where}: {call}() was called before reset(); call reset() first")

    def _fail(self, call: str, failure: BaseException) -> NoReturn:
        """Raise `failure` as an `EnvError` that names the worker and the environments."""
        reraise_of_signal(failure)
        self._failed = True
        if isinstance(failure, NonFiniteDataError):
            raise failure
        if isinstance(failure, EnvError):
            text = str(failure)
            raise EnvError(text if text.startswith(self._where) else f"{self._where}: {text}") from failure.__cause__
        raise EnvError(
            f"{self._where}, environments 0 to {self.num_envs - 1}: {call} raised at step {self._num_steps}, "
            f"seeds {self.seeds}: {describe(failure)}") from failure


@dataclass(frozen=True, repr=False)
class EnvFactory(Factory[VecEnv]):
    """Factory of `VecEnv` objects; it also stores the spaces of one environment."""

    observation_space: dict[str, AnySpace]
    """The space of each leaf of an environment's observations, as returned by `flatten_space`."""
    action_space: AnySpace
    """Action space of one environment; discrete actions count from 0."""
    raw_spaces: RawSpaces | Mapping[str, RawSpaces] | None = None
    """Spaces of one environment before they are flattened; with several policies, for each policy the spaces of one of
    its agents. None if the spaces are unknown."""
    spec: EnvSpec | None = field(default=None, compare=False)
    """Specification of an id that a script may have registered, for workers whose process has not registered it."""
    has_own_size: bool = False
    """Whether `env_fn` determines the number of environments, so that `vec_env_size` cannot be chosen."""
    device: str | None = field(default=None, compare=False)
    """Device of the environments' tensors, such as "cuda:0"; None for the CPU, and without tensors."""
    autoreset_mode: AutoresetMode | None = field(default=None, compare=False)
    """The autoreset mode of the vector environment; None if it is unknown."""

    @property
    def num_envs(self) -> int:
        """E, the number of environments."""
        return int(self.options.vec_env_size)

    def row_name(self, policy: str, row: int) -> str:
        """Return the name of a row of observations, such as "env 3", for error messages; `policy` is ""."""
        return f"env {row}"

    def __call__(  # type: ignore[override] # names its arguments, which callers pass by keyword
        self, *, index_grad_worker: int = 0, index_col_worker: int = 0, mode: str = "train", seed: int | None = None,
        num_threads: int = 1, incarnation: int = 0, kind: Callable[..., VecEnv] | None = None,
    ) -> VecEnv:
        """Build the environments of one worker; see `VecEnv` for the arguments that are not described here.

        Args:
            index_grad_worker: See `VecEnv`.
            index_col_worker: See `VecEnv`.
            mode: See `VecEnv`.
            seed: See `VecEnv`.
            num_threads: See `VecEnv`.
            incarnation: See `VecEnv`.
            kind: Class of the result, such as `TensorVecEnv`, or a function that builds it; None: `self.cls`.

        Raises:
            EnvError: The spaces of the environments differ from those that `create_factory` found.
        """
        if self.spec is not None:
            gym.registry.setdefault(self.spec.id, self.spec)
        env = (kind or self.cls)(
            self.options, index_grad_worker=index_grad_worker, index_col_worker=index_col_worker, mode=mode, seed=seed,
            num_threads=num_threads, incarnation=incarnation)
        if env.observation_space != self.observation_space or env.action_space != self.action_space:
            env.close()
            raise EnvError(
                f"{collection_worker(index_grad_worker, index_col_worker)}: expected spaces {self.observation_space}, "
                f"{self.action_space}, got {env.observation_space}, {env.action_space}; "
                "env_fn must build environments with the same spaces for all workers and for tests")
        return env
