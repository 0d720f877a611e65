"""`TokenEnv`: sequences of tokens as environments. E = environments (sequences that grow at the same time)."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces
from typing_extensions import override

from pytorchrl.agent.data import OBS_LEAF, Arrays, Step
from pytorchrl.agent.env.aliases import EnvKwargs
from pytorchrl.agent.env.autoreset import NO_INDEX
from pytorchrl.agent.env.common import (
    CommonEnvOptions,
    env_seeds,
    is_training_mode,
    open_monitor,
    reward_function,
)
from pytorchrl.agent.env.guard import describe
from pytorchrl.agent.env.spaces import RawSpaces, flatten_space
from pytorchrl.agent.env.statistics import EpisodeStatistics
from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import build_options, option
from pytorchrl.errors import EnvError, Problem
from pytorchrl.support.problems import raise_all
from pytorchrl.support.threads import State
from pytorchrl.support.tracebacks import USER_ERRORS, brief_errors, reraise_of_signal
from pytorchrl.support.worker_names import collection_worker


class TokenTask(ABC):
    """A task: draw a prompt, and compute the reward of an answer. Tokens are the numbers from 0 to `num_tokens` - 1.

        class Echo(TokenTask):
            num_tokens, max_prompt, max_answer = 10, 1, 1

            def prompt(self, rng):
                return [rng.integers(10)]

            def reward(self, prompt, answer):
                return float(answer == prompt)

    Attributes:
        num_tokens: Number of different tokens.
        max_prompt: Largest number of tokens of a prompt.
        max_answer: Largest number of tokens of an answer; longer answers are truncated.
        end: Token that ends an answer, of which it is the last token; None: all answers have `max_answer` tokens.
    """

    num_tokens: int
    max_prompt: int
    max_answer: int
    end: int | None = None

    @abstractmethod
    def prompt(self, rng: np.random.Generator) -> Sequence[int]:
        """Draw a prompt of 1 to `max_prompt` tokens."""

    @abstractmethod
    def reward(self, prompt: list[int], answer: list[int]) -> float:
        """Return the reward of an answer, which includes the token `end` if there is one."""


def _task_of(options: TokenEnv.Options, is_training: bool, where: str) -> TokenTask:
    """Build a task, and check its attributes; `where` names the worker in errors."""
    kwargs = options.env_kwargs | ({} if is_training else options.test_env_kwargs)
    try:
        task: TokenTask = options.env_fn(**kwargs)
        for wrap in options.wrappers:
            task = wrap(task)
    except USER_ERRORS as failure:
        reraise_of_signal(failure)
        raise EnvError(f"{where}: the task could not be built: {describe(failure)}") from failure
    for name in ("num_tokens", "max_prompt", "max_answer"):
        value = getattr(task, name, None)
        if not isinstance(value, int) or value < 1:
            raise EnvError(f"{where}: {type(task).__name__}.{name} must be a whole number >= 1, got {value!r}")
    if task.end is not None and task.end not in range(task.num_tokens):
        raise EnvError(f"{where}: {type(task).__name__}.end must be None or a token from 0 to {task.num_tokens - 1}, "
                       f"got {task.end!r}")
    return task


class TokenEnv(VecEnv):
    """E sequences of tokens that grow by one token per step; an episode is a prompt and its answer.

    The observation is the newest token, so an actor needs memory. While the prompt is read, the observations are its
    tokens, and actions are ignored: these steps are not valid, and no transitions. From the last token of the prompt
    on, each action is the next token of the answer. The reward of the last token is that of the whole answer.

    Sequences are numbered in the order in which they start; sequences that start in the same step have the order of
    their rows. `group_size` consecutive sequences have the same prompt.

    Args:
        options: Checked options; see `TokenEnv.Options`.
        index_grad_worker: See `VecEnv`.
        index_col_worker: See `VecEnv`.
        mode: See `VecEnv`. In "test" mode, each sequence has a prompt of its own.
        seed: See `VecEnv`.
        num_threads: Not used.
        incarnation: See `VecEnv`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CommonEnvOptions):
        """Settings of `TokenEnv`."""

        env_fn: Callable[..., TokenTask] = option(
            help="A class of tasks, such as SortDigits, or a function of keyword arguments that builds a TokenTask.")
        vec_env_size: int = option(64, help="Number of sequences that grow at the same time.", low=1)
        group_size: int = option(8, help="Number of sequences with the same prompt.", low=1)
        waits: bool = option(
            True, help="Whether new sequences start only when all have ended, so that all tokens of a rollout are "
                       "drawn with the same weights. Otherwise, a new one starts as soon as one has ended.")

        def needed_context(self) -> int:
            """Return the largest number of tokens that an actor reads: a prompt, and an answer without its last token.

            Raises:
                EnvError: The task cannot be built.
            """
            tasks = [_task_of(self, is_training, "the environments") for is_training in (True, False)]
            return max(task.max_prompt + min(task.max_answer, self.max_episode_steps or task.max_answer) - 1
                       for task in tasks)

        @override
        def training_problems(self) -> Iterator[Problem]:
            yield from super().training_problems()
            if self.waits and self.vec_env_size % self.group_size:
                yield Problem(
                    f"vec_env_size={self.vec_env_size} must be a multiple of group_size={self.group_size}, so that "
                    "groups are complete when all sequences have ended", "or set waits=False",
                    ("vec_env_size", "group_size", "waits"))

    @classmethod
    @override
    @brief_errors
    @checked_names
    def create_factory(  # type: ignore[override]
        cls, env_fn: Callable[..., TokenTask], env_kwargs: EnvKwargs | None = None,
        vec_env_size: int = Options.vec_env_size, **options: object,
    ) -> EnvFactory:
        """Return a factory of `TokenEnv` objects; build the task once, to find its spaces.

        Args:
            env_fn: A class of tasks, or a function of keyword arguments that builds a `TokenTask`.
            env_kwargs: Keyword arguments of the task.
            vec_env_size: E, the number of sequences that grow at the same time.
            options: Further fields of `TokenEnv.Options`.

        Raises:
            ConfigError: An option is invalid.
            EnvError: The task raises an exception, or lacks an attribute.
        """
        built = build_options(cls, {"env_fn": env_fn, "env_kwargs": dict(env_kwargs or {}),
                                    "vec_env_size": vec_env_size, **options})
        probe = cls(dataclasses.replace(built, group_size=1), seed=0)
        probe.reset()
        probe.close()
        return EnvFactory(cls, built, observation_space=probe.observation_space, action_space=probe.action_space,
                          raw_spaces=probe.raw_spaces)

    def __init__(
        self, options: Options, *, index_grad_worker: int = 0, index_col_worker: int = 0, mode: str = "train",
        seed: int | None = None, num_threads: int = 1, incarnation: int = 0,
    ) -> None:
        is_training = is_training_mode(mode)
        if is_training:
            raise_all(options.training_problems())
        size = self.num_envs = options.vec_env_size
        self._where = collection_worker(index_grad_worker, index_col_worker)
        self._seeds_of = functools.partial(
            env_seeds, is_training=is_training, path=(index_grad_worker, index_col_worker, incarnation), num_envs=size)
        self.seeds = self._seeds_of(seed)
        self._state = State.NEW
        self._task = _task_of(options, is_training, self._where)
        self._max_answer = min(self._task.max_answer, options.max_episode_steps or self._task.max_answer)
        self._group_size, self._waits = (options.group_size, options.waits) if is_training else (1, False)
        space = spaces.Discrete(self._task.num_tokens)
        self.observation_space, self.action_space = flatten_space(space), space
        self._raw_spaces = RawSpaces(space, space)
        self._transform = reward_function(options.reward_transform if is_training else None)
        self._statistics = EpisodeStatistics(size, open_monitor(
            options.log_dir, mode, index_grad_worker, index_col_worker))
        self._rows = np.arange(size)
        self._tokens = np.zeros((size, self._task.max_prompt + self._max_answer), np.int64)
        self._place = np.zeros(size, np.int64)  # of the newest token
        self._last = np.zeros(size, np.int64)  # place of the last token of the prompt
        self._waiting = np.zeros(size, np.bool_)
        self._num_started, self._prompt = 0, np.zeros(0, np.int64)

    @property
    @override
    def raw_spaces(self) -> RawSpaces:
        return self._raw_spaces

    @property
    @override
    def num_restarts(self) -> int:
        return 0

    @override
    def reset(self) -> tuple[Arrays, None]:
        """Start new sequences in all rows; return the first token of each prompt, (E,) int64, and no masks."""
        if self._state is State.STOPPED:
            self._refuse("reset")
        if self._state is State.NEW:
            self._rng = np.random.default_rng(self.seeds[0])
        self._state = State.RUNNING
        self._num_started = 0
        self._statistics.reset()
        self._start(self._rows)
        return {OBS_LEAF: self._tokens[:, 0].copy()}, None

    def _start(self, rows: np.ndarray) -> None:
        """Start a sequence in each of `rows`."""
        begun = 0
        while begun < len(rows):
            member = self._num_started % self._group_size
            if member == 0:
                self._prompt = self._draw_prompt()
            together = rows[begun:begun + self._group_size - member]
            self._last[together] = len(self._prompt) - 1
            self._tokens[together, :len(self._prompt)] = self._prompt
            begun += len(together)
            self._num_started += len(together)
        self._place[rows] = 0
        self._waiting[rows] = False

    def _draw_prompt(self) -> np.ndarray:
        task = self._task
        try:
            prompt = np.asarray(task.prompt(self._rng))
        except USER_ERRORS as failure:
            reraise_of_signal(failure)
            raise EnvError(f"{self._where}: {type(task).__name__}.prompt raised: {describe(failure)}") from failure
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu" or not 1 <= len(prompt) <= task.max_prompt or (
                not 0 <= prompt.min() <= prompt.max() < task.num_tokens):
            raise EnvError(f"{self._where}: {type(task).__name__}.prompt must return 1 to {task.max_prompt} whole "
                           f"numbers from 0 to {task.num_tokens - 1}, got {prompt.tolist()}")
        return prompt

    @override
    def step(self, action: np.ndarray) -> Step:
        """Append one token to every sequence that does not wait.

        Args:
            action: (E,) int64 tokens; those of rows that read their prompt, or wait, are ignored.
        """
        if self._state is not State.RUNNING:
            self._refuse("step")
        rows, acting, running = self._rows, ~self._waiting, ~self._waiting
        valid = acting & (self._place >= self._last)
        place = self._place + running
        self._place = place
        self._tokens[rows[valid], place[valid]] = action[valid]
        end = self._task.end
        is_cut = valid & (place - self._last >= self._max_answer)
        if end is not None:
            terminated = valid & (action == end)
        else:
            terminated = is_cut & (self._max_answer == self._task.max_answer)
        truncated = is_cut & ~terminated
        ended = terminated | truncated
        reward = np.zeros(self.num_envs, np.float32)
        first, index, final_obs = self._waiting.copy(), NO_INDEX, {}
        episodes = []
        if np.count_nonzero(ended):
            index = np.flatnonzero(ended)
            reward[index] = [self._reward_of(tokens[:end + 1], last) for tokens, end, last in zip(
                self._tokens[index].tolist(), place[index].tolist(), self._last[index].tolist(), strict=True)]
            final_obs = {OBS_LEAF: self._tokens[index, place[index]]}
            self._statistics.add(reward, valid)
            episodes = self._statistics.finish(ended, terminated, lambda _: {})
            if self._waits:
                self._waiting |= ended
                if self._waiting.all():
                    self._start(rows)
            else:
                self._start(index)
            first |= ended
        else:
            self._statistics.add(reward, valid)
        obs = np.where(self._waiting, 0, self._tokens[rows, self._place])
        if self._transform is not None:
            reward = np.asarray(self._transform(reward), np.float32)
        return Step({OBS_LEAF: obs}, reward, terminated, truncated, valid, first, index, final_obs, None, episodes)

    def _reward_of(self, tokens: list[int], last: int) -> float:
        """Return the reward of a prompt and its answer, of which the prompt ends at the place `last`."""
        task = self._task
        try:
            reward = float(task.reward(tokens[:last + 1], tokens[last + 1:]))
        except USER_ERRORS as failure:
            reraise_of_signal(failure)
            raise EnvError(f"{self._where}: {type(task).__name__}.reward raised: {describe(failure)}") from failure
        if not math.isfinite(reward):
            raise EnvError(f"{self._where}: {type(task).__name__}.reward must return a finite number, got {reward} for "
                           f"the prompt {tokens[:last + 1]} and the answer {tokens[last + 1:]}")
        return reward

    @override
    def close(self) -> None:
        self._state = State.STOPPED
        self._statistics.close()
