"""Faster checks of actions. Worker processes of `backend="async"` import this module, so it must not import torch."""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete


def speed_up_action_check(space: object) -> None:
    """Replace `contains` of a discrete action space, single or batched, with a faster method that has equal results.

    Gymnasium's environments call `contains` at every step. The replacement is three times as fast for a batched space,
    and ten times for a single one. Other spaces are not changed.
    """
    if type(space) is Discrete and space.dtype == np.int64:
        space.contains = _DiscreteCheck(space)  # type: ignore[method-assign,assignment]
    elif type(space) is MultiDiscrete and space.nvec.ndim == 1:
        space.contains = _MultiDiscreteCheck(space)  # type: ignore[method-assign,assignment]


class _DiscreteCheck:
    """Replacement for `contains` of a Discrete space. Actions of another type than int64 use `Discrete.contains`.

    Unlike a nested function, an instance of this class, or of the next one, can be pickled with the space.
    """

    def __init__(self, space: Discrete) -> None:
        self._space, self._low, self._end = space, int(space.start), int(space.start + space.n)

    def __call__(self, action: object) -> bool:
        if type(action) is np.int64:
            return self._low <= int(action) < self._end
        return Discrete.contains(self._space, action)


class _MultiDiscreteCheck:
    """Replacement for `contains` of a MultiDiscrete space.

    Actions whose shape or dtype differs from that of the space use `MultiDiscrete.contains`.
    """

    def __init__(self, space: MultiDiscrete) -> None:
        # The largest action fits the dtype of the space, but the number after it may not.
        self._space, self._low, self._high = space, space.start, space.start + (space.nvec - 1)

    def __call__(self, action: object) -> bool:
        low = self._low
        if isinstance(action, np.ndarray) and action.dtype == low.dtype and action.shape == low.shape:
            return not np.count_nonzero((action < low) | (action > self._high))
        return MultiDiscrete.contains(self._space, action)
