"""Action masks of a vector environment: the actions allowed after each observation.

E = number of environments, n = number of actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from gymnasium import spaces

from pytorchrl.agent.env.aliases import MASK_LEAF, AnySpace, Info, Observation
from pytorchrl.agent.env.spaces import ObservationReader, mask_flags, part_at
from pytorchrl.errors import ConfigError, EnvError


class ActionMasks:
    """Action masks from the observation leaf `action_mask`, or from `info["action_mask"]` if there is no such leaf.

    Args:
        reader: Reader of the observations.
        num_envs: E, the number of environments.
        where: Name of the worker, for error messages.
        shows_last: Whether an episode's last step returns the episode's last observation (autoreset mode NEXT_STEP).
        action_space: The space of the actions to which masks apply.
    """

    def __init__(
        self, reader: ObservationReader, num_envs: int, where: str, shows_last: bool, action_space: AnySpace,
    ) -> None:
        self._reader, self._where = reader, where
        # An action of a Discrete space is one choice among n actions.
        self._shows_last, self._has_one_choice = shows_last, isinstance(action_space, spaces.Discrete)
        self._action_space = action_space
        self.is_in_info = False
        """Whether the `info` of the first reset contained masks."""
        self._free = np.empty(0, dtype=np.bool_)
        self._all = np.ones(num_envs, dtype=np.bool_)

    def reset(self, observations: Observation, info: Info) -> np.ndarray | None:
        """Return the masks after a reset; if masks come from `info`, each later `info` must contain masks, too."""
        self.is_in_info = not self._reader.has_mask and MASK_LEAF in info
        mask = self.read(observations, info)
        if mask is not None:
            self._free = np.ones_like(mask)
        return mask

    def read(self, observations: Observation, info: Info) -> np.ndarray | None:
        """Return the masks of a step, (E, n) bool; None if the environment has no action masks.

        Raises:
            EnvError: Only one of the `info` of the first reset and that of this step contains `action_mask`, or the
                masks are not flags, one for each action.
        """
        if self._reader.has_mask:
            return self._flags(part_at(observations, self._reader.mask_path or ()))
        if not self.is_in_info:
            if MASK_LEAF in info:
                raise EnvError(f"{self._where}: info['{MASK_LEAF}'] appeared in a step, but the first reset had none, "
                               "so masks would be ignored; return it from reset, too")
            return None
        given = info.get(f"_{MASK_LEAF}", self._all)
        if MASK_LEAF not in info or not given.all():
            raise EnvError(
                f"{self._where}: expected info['{MASK_LEAF}'] in every step, because the first reset returned it; it "
                "is missing")
        return self._flags(info[MASK_LEAF])

    def _flags(self, given: Iterable[object]) -> np.ndarray:
        """Return masks (K, n) as bool; raise `EnvError` if they are not flags, one for each action."""
        try:
            return mask_flags(given, self._action_space)
        except ConfigError as failure:
            raise EnvError(f"{self._where}: {failure}") from None

    def read_at_end(
        self, observations: Observation, info: Info, done: np.ndarray, truncated: np.ndarray,
    ) -> np.ndarray | None:
        """Return the masks of a step in which episodes may have ended (`done`, (E,) bool).

        In NEXT_STEP mode, an action must be chosen even after an episode's last observation, although the environment
        ignores this action. The mask of a last observation may allow no action, so a mask that allows all actions
        replaces it, unless the episode was truncated and learners need the original mask to bootstrap.
        """
        mask = self.read(observations, info)
        if mask is None or not self._shows_last or not np.count_nonzero(done):
            return mask
        # Learners bootstrap with masks only if an action is a single choice. If an action consists of several choices,
        # the mask is always replaced, because it may allow no value for one of the choices.
        is_used = truncated & mask.any(axis=1) & self._has_one_choice
        return np.where((done & ~is_used)[:, None], True, mask)

    def final(
        self, mask: np.ndarray | None, final_index: np.ndarray, last_info_of: Callable[[int], Mapping[str, object]],
    ) -> np.ndarray | None:
        """Return the masks of the last observations of K episodes, (K, n) bool; all-false masks become all-true.

        Args:
            mask: (K, n) bool, the leaf `action_mask` of the last observations; None if there is no such leaf.
            final_index: (K,) int64, indices of the environments in which the episodes ended.
            last_info_of: Function that returns the `info` of an episode's last step, given the environment's index.
        """
        if self.is_in_info and len(final_index):
            infos = [last_info_of(index) for index in final_index.tolist()]
            mask = self._flags([info.get(MASK_LEAF, self._free[0]) for info in infos])
        return None if mask is None else mask | ~mask.any(axis=1, keepdims=True)

    def complete(self, info: Info, cut: np.ndarray) -> None:
        """Set the masks in `info` to allow all actions in environments that raised exceptions (`cut`, (E,) bool)."""
        if self.is_in_info:
            info[MASK_LEAF] = np.where(cut[:, None], self._free, info.get(MASK_LEAF, self._free))
            info[f"_{MASK_LEAF}"] = info.get(f"_{MASK_LEAF}", ~self._all) | cut
