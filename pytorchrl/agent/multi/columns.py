"""Observations, masks and step results of one policy's agents; a column is one agent in one environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from gymnasium.spaces import Discrete

from pytorchrl.agent.data import Arrays, Step
from pytorchrl.agent.env.aliases import MASK_LEAF, Action, AnySpace, Observation
from pytorchrl.agent.env.autoreset import NO_INDEX
from pytorchrl.agent.env.spaces import (
    ObservationReader,
    RawSpaces,
    action_start,
    flatten_action_space,
    mask_flags,
    part_at,
)
from pytorchrl.errors import ConfigError, EnvError


def column_name(agents: Sequence[str], column: int) -> str:
    """Return the environment and the agent of a column of a policy that controls these agents."""
    env, place = divmod(column, len(agents))
    return f"env {env}, agent {agents[place]!r}"


class PolicyColumns:
    """The agents of one policy in E environments.

    Args:
        agents: Names of the agents.
        observation_space: Observation space of each agent.
        action_space: Action space of each agent.
        num_envs: E, the number of environments.

    Attributes:
        places: The index of each agent in `agents`.
        num_columns: C, the number of columns; a column is one agent in one environment.
        reader: Reader of the observations.
        observation_space: The space of each leaf, as `flatten_space` returns it.
        action_space: Action space, in which discrete actions start at 0.
        raw_observation_space: The observation space before it was flattened.
        obs: The newest observations, a mapping from leaf to (C, ...).
        mask: (C, n) bool, the newest action masks; None if the agents have no masks.
        waiting: (C,) bool, whether the newest mask of an agent allows no action, so that the agent waits for its turn.
            The entry in `mask` then allows all actions, and the action that is chosen is ignored.
        takes_turns: Whether an agent has waited so far.
    """

    def __init__(
        self, agents: Sequence[str], observation_space: AnySpace, action_space: AnySpace, num_envs: int,
    ) -> None:
        self.places = {agent: place for place, agent in enumerate(agents)}
        self.num_columns = num_envs * len(agents)
        self.reader = ObservationReader(observation_space)
        self.observation_space, self.action_space = self.reader.space, flatten_action_space(action_space)
        self._values, self._num_reads = self.reader.value_check(), 0
        self.raw_observation_space, self._raw_action_space = observation_space, action_space
        self._action_start = action_start(action_space)
        self.obs: Arrays = {leaf: np.zeros((self.num_columns, *(space.shape or ())), space.dtype)
                            for leaf, space in self.observation_space.items()}
        self.mask = self.reader.all_allowed(observation_space, self.num_columns)
        self.waiting, self.takes_turns = np.zeros(self.num_columns, np.bool_), False

    @property
    def raw_spaces(self) -> RawSpaces:
        """The spaces of each agent before they are flattened; valid only after the first reset."""
        return RawSpaces(self.raw_observation_space, self._raw_action_space,
                         has_mask_in_info=self.mask is not None and not self.reader.has_mask)

    def column(self, env: int, agent: str) -> int:
        """Return the index of the column for an agent in environment `env`."""
        return env * len(self.places) + self.places[agent]

    def as_env_action(self, value: np.ndarray) -> Action:
        """Convert `value`, in which discrete actions start at 0, to the action that the environment expects."""
        if self._action_start is not None:
            value = value + self._action_start
        space = self._raw_action_space
        # The environment may change the array, and `value` is a part of the stored actions.
        return int(value) if isinstance(space, Discrete) else np.array(value, space.dtype)

    def allow_all(self, env: int) -> None:
        """Allow all actions in environment `env`; call this before `write`, which sets the masks of present agents."""
        if self.mask is not None:
            first = env * len(self.places)
            self.mask[first:first + len(self.places)] = True
            self.waiting[first:first + len(self.places)] = False

    def write(
        self, columns: list[int], observations: list[Observation], infos: list[object], is_first_reset: bool,
    ) -> None:
        """Write observations and masks to `columns`; other columns stay unchanged.

        Raises:
            EnvError: Only some infos contain masks, or the infos of the first reset contained masks and all of these do
                not, or conversely.
        """
        for leaf, rows in self.read(observations, columns).items():
            self.obs[leaf][columns] = rows
        masks = self.masks(observations, infos)
        if masks is not None:
            if self.mask is None:
                if not is_first_reset:
                    raise EnvError(
                        f"info['{MASK_LEAF}'] of {list(self.places)} appeared after the first reset, which had none; "
                        f"put '{MASK_LEAF}' into the observation space, where masks are known before agents appear")
                self.mask = np.ones((self.num_columns, masks.shape[1]), np.bool_)
            waiting = np.logical_not(masks.any(axis=1))
            if waiting.any():
                if not isinstance(self.action_space, Discrete):
                    raise EnvError(f"the action mask of {list(self.places)} allows no action; only agents with a "
                                   "Discrete action space may wait for their turn")
                self.takes_turns, masks = True, masks | np.expand_dims(waiting, 1)
            self.mask[columns], self.waiting[columns] = masks, waiting
        elif self.mask is not None:
            raise EnvError(f"expected info['{MASK_LEAF}'] of {list(self.places)} in every step, because the first "
                           "reset returned it; it is missing")

    def read(self, observations: list[Observation], columns: Sequence[int]) -> Arrays:
        """Return the observations of the agents of K columns as leaves, (K, ...) each.

        Raises:
            EnvError: A category or flag is outside its space.
        """
        def name_of(row: int) -> str:
            return column_name(list(self.places), columns[row])

        leaves, self._num_reads = self.reader.read_rows(observations), self._num_reads + 1
        if self._num_reads >= self._values.due and (
                problem := self._values.check(leaves, self._num_reads, name_of)):
            raise EnvError(problem)
        return leaves

    def masks(self, observations: list[Observation], infos: list[object]) -> np.ndarray | None:
        """Return the action masks of K agents, (K, n) bool; None if neither observations nor infos contain masks.

        Raises:
            EnvError: Only some of the agents have a mask in `infos`, or a mask is not one flag for each action.
        """
        if self.reader.mask_path is not None:
            return self._flags([part_at(row, self.reader.mask_path) for row in observations])
        given = [info[MASK_LEAF] for info in infos if isinstance(info, Mapping) and MASK_LEAF in info]
        if given and len(given) < len(infos):
            raise EnvError(f"info['{MASK_LEAF}'] must be given for all agents of a policy, or for none; "
                           f"got {len(given)} for {len(infos)} agents")
        return self._flags(given) if given else None

    def _flags(self, given: list[object]) -> np.ndarray:
        try:
            return mask_flags(given, self._raw_action_space)
        except ConfigError as failure:
            raise EnvError(f"agents {list(self.places)}: {failure}") from None


class ColumnsStep:
    """Result of one env step for all columns (agents) of a policy, recorded agent by agent.

    Args:
        columns: The columns of the policy, with the newest observations and masks.

    Attributes:
        first: (C,) bool, whether the observation of a column is the first of an episode.
    """

    def __init__(self, columns: PolicyColumns) -> None:
        self._columns = columns
        count = columns.num_columns
        self._reward = np.zeros(count, np.float32)
        self._terminated, self._truncated, self._valid, self.first = (np.zeros(count, np.bool_) for _ in range(4))
        self._ended: list[int] = []
        self._last: list[Arrays] = []
        self._last_masks: list[np.ndarray] = []

    def add_transition(self, column: int, reward: float, terminated: bool, truncated: bool) -> None:
        """Record the transition of an agent that acted."""
        self._reward[column], self._valid[column] = reward, True
        self._terminated[column], self._truncated[column] = terminated, truncated

    def add_waiting(self, column: int, reward: float, terminated: bool, truncated: bool) -> None:
        """Record what an agent received while it waited for its turn."""
        self._reward[column], self._terminated[column], self._truncated[column] = reward, terminated, truncated

    def add_end(self, column: int, observation: Observation | None, info: object) -> None:
        """Record the last `observation` of an agent's episode; if it is None, use the agent's previous observation."""
        columns = self._columns
        self._ended.append(column)
        self._last.append(
            {leaf: rows[column:column + 1].copy() for leaf, rows in columns.obs.items()} if observation is None
            else columns.read([observation], [column]))
        if columns.mask is not None:
            masks = None if observation is None else columns.masks([observation], [info])
            unknown = columns.mask[column] if observation is None else np.ones_like(columns.mask[column])
            allowed = unknown if masks is None else masks[0]
            self._last_masks.append(allowed | ~allowed.any())

    def step(self, transform: Callable[[np.ndarray], np.ndarray] | None) -> Step:
        """Return the step, with rewards changed by `transform`; None leaves rewards unchanged."""
        reward = self._reward if transform is None else np.asarray(transform(self._reward), np.float32)
        columns, last = self._columns, self._last
        return Step(
            obs=columns.obs, reward=reward, terminated=self._terminated, truncated=self._truncated, valid=self._valid,
            first=self.first, final_index=np.array(self._ended, np.int64) if self._ended else NO_INDEX,
            final_obs={leaf: np.concatenate([row[leaf] for row in last]) for leaf in columns.obs} if last else {},
            mask=columns.mask, episodes=[],
            final_mask=np.stack(self._last_masks) if self._last_masks else None,
            waiting=columns.waiting.copy() if columns.takes_turns else None)
