"""`VecEnv`: E environments stepped together, with one meaning whatever steps them."""

from __future__ import annotations

import copy
import dataclasses
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from pytorchrl.agent.data import OBS_LEAF, Arrays, Step
from pytorchrl.agent.env.autoreset import NO_INDEX, make_autoreset
from pytorchrl.agent.env.backends import build_vector, close_vector, reset_vector
from pytorchrl.agent.env.guard import describe, observation_problem
from pytorchrl.agent.env.restarts import Restarts, cut_in
from pytorchrl.agent.env.single import Blueprint
from pytorchrl.agent.env.spaces import MASK_LEAF, ObservationReader, action_start, flatten_action_space
from pytorchrl.agent.env.statistics import EpisodeStatistics, Monitor
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import Factory, Part, build_options, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.seeding import Stream, check_seed, derive_seed
from pytorchrl.errors import ConfigError, EnvError, NonFiniteDataError
from pytorchrl.tracebacks import brief_errors

if TYPE_CHECKING:
    from typing_extensions import Self

# Environments see the upper 31 bits of a seed: some keep seeds as signed 32-bit integers (ALE, EnvPool).
_SEED_SHIFT = 32
# A fault that comes back more often than this in 1000 steps is taken for permanent.
_MAX_RESTARTS = 3
_LARGE = 2.0**17
"""For larger numbers, float32 (mantissa of 24 bits) has at most six binary places."""


class VecEnv(Part):
    """E environments, stepped together.

    Args:
        options: See `VecEnv.Options`.
        index_grad_worker: Place in the worker tree; with the next, it makes seeds and the monitor's name.
        index_col_worker: Collection worker of that gradient worker.
        mode: "train", or "test": raw rewards, whole games, `test_env_kwargs`, seeds of their own.
        seed: Of the experiment; None draws one.
        num_threads: Threads that a native vector environment may use.
        incarnation: How often this worker was restarted before; gives new seeds.

    Raises:
        ConfigError: The options do not fit the environment.
        EnvError: An environment could not be built.
    """

    home: ClassVar[str] = "environments"

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Settings of a vector of environments."""

        env_fn: Any = option(
            help="Gymnasium id, EnvSpec, or a function of keyword arguments that builds one environment (or, if it "
            "takes num_envs, a vector environment).")
        env_kwargs: dict[str, Any] = option(
            default_factory=dict, help="Keyword arguments of every environment.")
        test_env_kwargs: dict[str, Any] = option(
            default_factory=dict, help="Keyword arguments that replace those of env_kwargs when testing.")
        vec_env_size: int = option(1, help="Number of environments stepped together.", low=1)
        backend: str = option(
            "auto", help="How environments are stepped; auto uses the native vector environment if there is one, else sync; also sync for fewer than "
            "4 of Gymnasium's classic control environments (CartPole), where it is faster.",
            choices=("auto", "vector", "sync", "async", "envpool"))
        autoreset: str = option(
            "auto", help="When a new episode starts; auto takes same_step where offered, else next_step.",
            choices=("auto", "same_step", "next_step"))
        max_episode_steps: int | None = option(None, help="Steps after which an episode is truncated.", low=1)
        frame_stack: int = option(1, help="Number of last observations seen as one.", low=1)
        wrappers: tuple[Any, ...] = option((), help="Functions from environment to environment, applied in order.")
        reward_transform: str | float | None = option(
            None, help="What learners see of a reward: its 'sign', 'clip' to [-1, 1], or times a number; statistics "
            "stay raw.")
        end_on_life_loss: bool = option(
            False, help="Whether a falling info['lives'] is a termination for the learner; the game goes on.")
        on_env_error: str = option(
            "auto", help="What an exception in one environment does: restart replaces that environment and cuts its "
            "episode; raise ends the run. Native vector environments always raise; auto restarts all others.",
            choices=("auto", "restart", "raise"))
        max_env_restarts: int = option(
            _MAX_RESTARTS, help="Restarts of one worker's environments allowed within 1000 steps of its vector; needs "
            "on_env_error='restart'.", low=1)
        keep_float64: bool | None = option(
            None, help="Whether float64 observations stay float64, with twice the memory of float32; None: if the first "
            "observation has a number beyond 131072, for which float32 has at most six binary places.")
        log_dir: str | None = option(None, help="Folder for one monitor CSV a worker, of finished episodes.")
        info_keywords: tuple[str, ...] = option((), help="Entries of an episode's last info written to the monitor.")

        def __post_init__(self) -> None:
            """Check what single fields cannot tell."""
            super().__post_init__()
            if not (isinstance(self.env_fn, (str, gym.envs.registration.EnvSpec)) or callable(self.env_fn)):
                raise ConfigError(
                    f"env_fn must be a Gymnasium id, an EnvSpec or a function, got {self.env_fn!r}; "
                    "pass the function, not what it returns")
            check_shared_options(self)
            if self.max_env_restarts != _MAX_RESTARTS and self.on_env_error != "restart":
                raise ConfigError(
                    f"max_env_restarts={self.max_env_restarts} needs on_env_error='restart', got {self.on_env_error!r}")
            if clash := set(self.info_keywords) & set(Monitor.COLUMNS):
                raise ConfigError(f"info_keywords must differ from the monitor's own columns, got {sorted(clash)}")

    @classmethod
    @brief_errors
    @checked_names
    def create_factory(
        cls, env_fn: Any, env_kwargs: dict[str, Any] | None = None, vec_env_size: int = 1, **options: Any,
    ) -> EnvFactory:
        """A factory for vectors of `vec_env_size` environments; builds one at once to learn its spaces, and closes it.

        Args:
            env_fn: Gymnasium id, EnvSpec, or function of keyword arguments.
            env_kwargs: Those keyword arguments.
            vec_env_size: E.
            options: Further fields of `VecEnv.Options`.

        Raises:
            ConfigError: A wrong option, an unknown id (names the nearest), a missing package (names the extra).
            EnvError: The environment raises, or breaks its contract, when built or reset.
        """
        built = build_options(cls, {
            "env_fn": env_fn, "env_kwargs": dict(env_kwargs) if isinstance(env_kwargs, Mapping) else env_kwargs or {}, "vec_env_size": vec_env_size, **options})
        probe, obs, mask = cls._probe(built)
        if built.keep_float64 is None and any(map(_is_large, obs.values())):
            wide = dataclasses.replace(built, keep_float64=True)
            found, obs, _ = cls._probe(wide)
            if any(leaf.dtype == np.float64 and _is_large(leaf) for leaf in obs.values()):
                built, probe = wide, found
        return EnvFactory(
            cls, built, observation_space=probe.observation_space, action_space=probe.action_space,
            has_action_mask=mask is not None)

    @classmethod
    def _probe(cls, options: Any) -> tuple[Self, Arrays, np.ndarray | None]:
        """Build and close a vector of one environment; return the vector and the result of its reset."""
        probe = cls(dataclasses.replace(options, vec_env_size=1, log_dir=None, backend=_probe_backend(options)), seed=0)
        try:
            return probe, *probe.reset()
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
        if mode not in ("train", "test"):
            raise ConfigError(f"mode must be 'train' or 'test', got {mode!r}")
        is_training = mode == "train"
        self.num_envs = options.vec_env_size
        self._where = f"worker g{index_grad_worker}-c{index_col_worker}"
        self._seeds = env_seeds(
            seed, Stream.ENV if is_training else Stream.EVALUATION,
            (index_grad_worker, index_col_worker, incarnation), self.num_envs)
        self._closed = False
        self._failed = False
        self._num_steps = -1
        self._restarts = Restarts(options.max_env_restarts, lambda: self._num_steps)
        self._envs, self.autoreset_mode = build_vector(Blueprint(
            env_fn=options.env_fn, env_kwargs=options.env_kwargs | ({} if is_training else options.test_env_kwargs),
            num_envs=self.num_envs, backend=options.backend, autoreset=options.autoreset,
            max_episode_steps=options.max_episode_steps, frame_stack=options.frame_stack, wrappers=options.wrappers,
            num_threads=num_threads, seeds=self._seeds, where=self._where,
            restarts=None if options.on_env_error == "raise" else self._restarts,
            needs_restarts=options.on_env_error == "restart"))
        single_action_space = self._envs.single_action_space
        self._reader = ObservationReader(self._envs.single_observation_space, bool(options.keep_float64))
        self.observation_space = self._reader.space
        self.action_space = flatten_action_space(single_action_space)
        self._action_start = action_start(single_action_space)
        self._action_shape = (self.num_envs, *(single_action_space.shape or ()))
        self._action_dtype = single_action_space.dtype
        self._is_continuous = self._action_dtype is not None and self._action_dtype.kind == "f"
        self._autoreset = make_autoreset(self.autoreset_mode, self._reader, self._envs)
        self._transform = reward_function(options.reward_transform if is_training else None)
        self._monitor_path = None if options.log_dir is None else (
            Path(options.log_dir) / f"monitor_{mode}_g{index_grad_worker:03d}_c{index_col_worker:03d}.csv")
        monitor = None if self._monitor_path is None else Monitor(self._monitor_path, options.info_keywords)
        self._statistics = EpisodeStatistics(self.num_envs, monitor)
        self._ends_on_life_loss = options.end_on_life_loss and is_training
        self._lives: np.ndarray | None = None
        self._has_info_mask = False
        self._free_mask = np.empty(0, dtype=np.bool_)
        # What a step without an end returns; nobody writes to them.
        self._all = np.ones(self.num_envs, dtype=np.bool_)
        self._none = np.zeros(self.num_envs, dtype=np.bool_)

    @property
    def num_restarts(self) -> int:
        """Environments that were replaced so far because they raised."""
        return self._restarts.total

    def reset(self) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Start new episodes everywhere and forget running ones.

        The first call seeds the environments; later ones go on with their generators.

        Returns:
            obs, leaf -> (E, ...), and mask, (E, n) bool of allowed actions, or None.

        Raises:
            EnvError: An environment raised or broke its contract.
        """
        seeds = self._seeds if self._num_steps < 0 else None
        try:
            observations, info = reset_vector(self._envs, seeds)
        except Exception as failure:  # noqa: BLE001 - raised again with where it happened
            self._fail("reset", failure)
        if self._num_steps < 0:
            self._num_steps = 0
            problem = observation_problem(self._envs.observation_space, observations)
            if problem:
                raise EnvError(f"{self._where}: reset: {problem}")
        self._autoreset.reset()
        self._statistics.reset()
        self._has_info_mask = not self._reader.has_mask and MASK_LEAF in info
        self._lives = self._lives_in(info)
        mask = self._mask(observations, info)
        if mask is not None:
            self._free_mask = np.ones_like(mask)
        return self._reader.read(observations), mask

    def step(self, action: np.ndarray) -> Step:
        """Make one step in every environment.

        Args:
            action: (E, ...), int64 counting from 0, or float32.

        Raises:
            EnvError: An environment raised; an action of another shape.
            NonFiniteDataError: NaN or infinity in an action.
        """
        try:
            observations, reward, terminated, truncated, info = self._envs.step(self._outgoing(action))
        except Exception as failure:  # noqa: BLE001 - raised again with where it happened
            self._fail("step", failure)
        if self._num_steps == 0:
            self._check_first_step(observations, reward, terminated, truncated)
        self._num_steps += 1
        done = terminated | truncated
        if self._autoreset.pending or self._lives is not None or np.count_nonzero(done):
            return self._settle(done, observations, reward, terminated, truncated, info)
        self._statistics.add(reward)
        if self._transform is not None:
            reward = self._transform(reward)
        return Step(
            {OBS_LEAF: observations} if self._reader.is_plain else self._reader.read(observations),
            reward if reward.dtype == np.float32 else reward.astype(np.float32),
            terminated, truncated, self._all, self._none, NO_INDEX, {},
            self._mask(observations, info), [])

    def close(self) -> None:
        """Close environments, processes and the monitor file; closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._statistics.close()
        close_vector(self._envs, self._failed)

    def _settle(
        self, done: np.ndarray, observations: Any, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray,
        info: dict[str, Any],
    ) -> Step:
        """The step in which an episode may have ended or begun."""
        if self._autoreset.pending or np.count_nonzero(done):
            try:
                settled = self._autoreset.settle(done, observations, info)
            except Exception as failure:  # noqa: BLE001 - raised again with where it happened
                self._fail("reset", failure)
            cut = cut_in(info)
            observations, info, valid, first, final_index, final_obs, last_info_of, final_mask = settled
            if self._has_info_mask and len(final_index):
                final_mask = self._final_mask_of([last_info_of(index) for index in final_index.tolist()])
            if cut is not None:
                valid = ~cut if valid is None else valid & ~cut
                self._statistics.forget(cut)
                info = self._completed(info, cut)
            self._statistics.add(reward, valid)
            episodes = self._statistics.finish(done if cut is None else done & ~cut, terminated, last_info_of)
            truncated = truncated & ~terminated
        else:
            valid, first, final_index, final_obs, final_mask, episodes = None, self._none, NO_INDEX, {}, None, []
            self._statistics.add(reward)
        if self._lives is not None:
            lives = self._lives_in(info)
            lost = (lives < self._lives) & ~done
            if valid is not None:
                lost &= valid
            self._lives = lives
            if np.count_nonzero(lost):
                terminated, first = terminated | lost, first | lost
        if self._transform is not None:
            reward = self._transform(reward)
        return Step(
            self._reader.read(observations), reward.astype(np.float32, copy=False), terminated, truncated,
            self._all if valid is None else valid, first, final_index, final_obs,
            self._settled_mask(observations, info, done, truncated), episodes,
            None if final_mask is None else final_mask | ~final_mask.any(axis=1, keepdims=True))

    def _completed(self, info: dict[str, Any], cut: np.ndarray) -> dict[str, Any]:
        """`info` with what environments that raised could not say, where their last observation is still shown."""
        if self.autoreset_mode is not AutoresetMode.NEXT_STEP:
            return info
        info = dict(info)
        if self._lives is not None:
            info["lives"] = np.where(cut, self._lives, info.get("lives", self._lives))
        if self._has_info_mask:
            info[MASK_LEAF] = np.where(cut[:, None], self._free_mask, info.get(MASK_LEAF, self._free_mask))
            info[f"_{MASK_LEAF}"] = info.get(f"_{MASK_LEAF}", self._none) | cut
        return info

    def _outgoing(self, action: np.ndarray) -> np.ndarray:
        """The action as the environments expect it."""
        if action.shape != self._action_shape:
            raise EnvError(f"expected actions of shape {self._action_shape}, got {action.shape}")
        if self._is_continuous and not math.isfinite(action.sum()):
            bad = np.flatnonzero(~np.isfinite(action.reshape(self.num_envs, -1)).all(axis=1)).tolist()
            if bad:
                raise NonFiniteDataError(
                    f"{self._where}, step {self._num_steps}: NaN or infinity in the actions of environments {bad}")
        if self._action_start is not None:
            action = action + self._action_start
        return action if action.dtype == self._action_dtype else action.astype(self._action_dtype)

    def _mask(self, observations: Any, info: dict[str, Any]) -> np.ndarray | None:
        if self._reader.has_mask:
            return self._reader.mask(observations)
        if not self._has_info_mask:
            return None
        given = info.get(f"_{MASK_LEAF}", self._all)
        if MASK_LEAF not in info or not given.all():
            raise EnvError(f"{self._where}: expected info['{MASK_LEAF}'] in every step as in the first reset, got none")
        return np.asarray(info[MASK_LEAF], dtype=np.bool_)

    def _settled_mask(
        self, observations: Any, info: dict[str, Any], done: np.ndarray, truncated: np.ndarray,
    ) -> np.ndarray | None:
        """As `_mask`; under NEXT_STEP an episode's last observation allows everything, unless a learner looks beyond it.

        Its action is ignored, and where the episode ended by itself the environment need not allow any.
        """
        mask = self._mask(observations, info)
        if mask is None or self.autoreset_mode is not AutoresetMode.NEXT_STEP or not np.count_nonzero(done):
            return mask
        # Only learners of one choice among n look beyond an end; of several choices each would have to allow one.
        is_seen = truncated & mask.any(axis=1) & isinstance(self.action_space, gym.spaces.Discrete)
        return np.where((done & ~is_seen)[:, None], True, mask)

    def _final_mask_of(self, infos: list[Mapping[str, Any]]) -> np.ndarray:
        """(K, n) bool of the last infos of K episodes; all allowed where one does not say."""
        free = self._free_mask[0]
        return np.stack([np.asarray(info.get(MASK_LEAF, free)).astype(np.bool_) for info in infos])

    def _lives_in(self, info: dict[str, Any]) -> np.ndarray | None:
        if not self._ends_on_life_loss:
            return None
        if "lives" not in info:
            raise EnvError(
                f"{self._where}: end_on_life_loss needs info['lives'], got {sorted(info)}; set end_on_life_loss=False")
        return np.array(info["lives"])

    def _check_first_step(self, observations: Any, reward: Any, terminated: Any, truncated: Any) -> None:
        problem = observation_problem(self._envs.observation_space, observations)
        for name, array, kinds in (
                ("reward", reward, "fiu"), ("terminated", terminated, "b"), ("truncated", truncated, "b")):
            if np.shape(array) != (self.num_envs,) or array.dtype.kind not in kinds:
                problem = (f"expected {name} of shape ({self.num_envs},) and kind {kinds!r}, "
                           f"got {getattr(array, 'dtype', type(array))} {np.shape(array)}")
        if problem:
            raise EnvError(f"{self._where}: step: {problem}")

    def _fail(self, call: str, failure: Exception) -> NoReturn:
        """Raise `failure` as an error of ours that says where it happened."""
        self._failed = True
        if isinstance(failure, NonFiniteDataError):
            raise failure
        if isinstance(failure, EnvError):
            text = str(failure)
            raise EnvError(text if text.startswith(self._where) else f"{self._where}: {text}") from failure.__cause__
        raise EnvError(
            f"{self._where}, environments 0 to {self.num_envs - 1}: {call} raised at step {max(0, self._num_steps)}, "
            f"seeds {self._seeds}: {describe(failure)}") from failure


@dataclass(frozen=True, repr=False)
class EnvFactory(Factory[VecEnv]):
    """A recipe for vectors of environments, which knows their spaces."""

    observation_space: dict[str, gym.Space[Any]]
    """Leaf -> space of one environment, as `flatten_space` makes them."""
    action_space: gym.Space[Any]
    """Of one environment, counting from 0."""
    has_action_mask: bool
    """Whether the environment tells which actions are allowed."""

    @property
    def num_envs(self) -> int:
        """E."""
        return int(self.options.vec_env_size)

    def __call__(  # type: ignore[override] # names what it takes; callers pass by keyword
        self, *, index_grad_worker: int = 0, index_col_worker: int = 0, mode: str = "train", seed: int | None = None,
        num_threads: int = 1, incarnation: int = 0,
    ) -> VecEnv:
        """Build the environments of one worker; see `VecEnv` for the arguments.

        Raises:
            EnvError: The environments have other spaces than those seen when the factory was made.
        """
        env = self.cls(
            self.options, index_grad_worker=index_grad_worker, index_col_worker=index_col_worker, mode=mode, seed=seed,
            num_threads=num_threads, incarnation=incarnation)
        if env.observation_space != self.observation_space or env.action_space != self.action_space:
            env.close()
            raise EnvError(
                f"worker g{index_grad_worker}-c{index_col_worker}: expected spaces {self.observation_space}, "
                f"{self.action_space}, got {env.observation_space}, {env.action_space}; "
                "all workers, and tests, need the same spaces")
        return env


def _is_large(leaf: np.ndarray) -> bool:
    """Return whether the leaf has a number too large for float32 to keep more than six binary places."""
    return leaf.dtype.kind == "f" and float(np.abs(leaf).max(initial=0.0)) > _LARGE  # float16 has no number as large as the bound


def _probe_backend(options: VecEnv.Options) -> str:
    """What steps the single environment of the probe: never processes."""
    return "sync" if options.backend == "async" else options.backend


def check_shared_options(options: Any) -> None:
    """Raise `ConfigError` for options that vectors of environments of one agent and of several have in common."""
    if isinstance(options.reward_transform, str) and options.reward_transform not in ("sign", "clip"):
        raise ConfigError(f"reward_transform must be None, 'sign', 'clip' or a number, got {options.reward_transform!r}")
    if isinstance(options.log_dir, str) and not options.log_dir:
        raise ConfigError("log_dir must be a folder or None, got an empty text")
    for name in ("env_kwargs", "test_env_kwargs"):
        for key, value in getattr(options, name).items():
            try:
                copy.deepcopy(value)
            except Exception as failure:  # noqa: PERF203 - a few entries, and the error names the one
                raise ConfigError(f"{name}[{key!r}] cannot be copied ({describe(failure)}), and every environment gets a copy of its own; "
                                  "create it in the environment's constructor") from failure
    for wrapper in options.wrappers:
        if not callable(wrapper):
            raise ConfigError(f"wrappers must be functions from environment to environment, got {wrapper!r}")


def env_seeds(seed: int | None, stream: Stream, path: tuple[int, ...], num_envs: int) -> list[int]:
    """A seed for each environment of a vector at that place in the worker tree; without a seed they are drawn."""
    root = secrets.randbits(63) if seed is None else check_seed(seed)
    return [derive_seed(root, stream, *path, index) >> _SEED_SHIFT for index in range(num_envs)]


def reward_function(transform: str | float | None) -> Callable[[np.ndarray], np.ndarray] | None:
    """What makes rewards (E,) into what learners see; None where they see them as they are."""
    if transform is None:
        return None
    if transform == "sign":
        return np.sign
    if transform == "clip":
        return lambda reward: np.clip(reward, -1, 1)
    scale = np.float32(transform)
    return lambda reward: reward * scale
