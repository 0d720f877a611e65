"""Statistics over a window of numbers."""

from __future__ import annotations

from collections import deque

import numpy as np

_QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


class WindowStat:
    """Mean, population standard deviation and quantiles of the last `n` numbers.

    Args:
        name: Name of the quantity.
        n: Size of the window.
    """

    def __init__(self, name: str, n: int) -> None:
        self.name, self._count = name, 0
        self._window: deque[float] = deque(maxlen=n)

    def push(self, number: float) -> None:
        """Add a number."""
        self._count += 1
        self._window.append(number)

    def stats(self) -> dict[str, int | float | list[float] | None]:
        """Return `count`, `mean`, `std` and `quantiles` (0, 10, 50, 90, 100 %).

        `count` includes all numbers ever added; the other values describe the window, and are None if it is empty.
        """
        if not self._window:
            return {"count": 0, "mean": None, "std": None, "quantiles": None}
        window = np.array(self._window)
        return {"count": self._count, "mean": float(window.mean()), "std": float(window.std()),
                "quantiles": np.quantile(window, _QUANTILES).tolist()}
