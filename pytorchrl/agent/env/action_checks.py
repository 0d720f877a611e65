"""Faster checks of actions. Worker processes of `backend="async"` import this module, so it must not import torch."""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete

# Up to this number of actions, Python finds the smallest and the largest one faster than NumPy compares them.
_FEW = 32


def speed_up_action_check(space: object) -> None:
    """Replace `contains` of a discrete action space, single or batched, with a faster method that has equal results.

    Gymnasium's environments call `contains` at every step. The replacement takes a tenth of the time for a single
    space, and a third of it or less for a batched space. Other spaces are not changed.
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
        # The lowest and the highest action of a few environments; None if environments differ, or if there are many.
        bounds = {*zip(self._low.tolist(), self._high.tolist(), strict=True)}
        self._bounds = bounds.pop() if len(bounds) == 1 and len(self._low) <= _FEW else None

    def __call__(self, action: object) -> bool:
        low = self._low
        if isinstance(action, np.ndarray) and action.dtype == low.dtype and action.shape == low.shape:
            if self._bounds is not None:
                numbers = action.tolist()
                return self._bounds[0] <= min(numbers) and max(numbers) <= self._bounds[1]
            return not np.count_nonzero((action < low) | (action > self._high))
        return MultiDiscrete.contains(self._space, action)
