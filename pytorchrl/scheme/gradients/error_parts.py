"""Attach the recorded events of a remote gradient worker to its errors, so that the events reach the update worker.

The journal of a worker records the order of its events, so that the run can be replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pytorchrl.runtime import WorkersPart


class Journaled(Protocol):
    """A worker that records the order of its events in a journal."""

    index_worker: int

    def take_part(self) -> WorkersPart | None:
        """Return the events that the journal has recorded since the last call; None if the run is not recorded."""


W = TypeVar("W", bound=Journaled)
P = ParamSpec("P")
R = TypeVar("R")


def errors_carry_part(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Decorate a worker's method so that an error of the method carries the journal's new events, as `error.part`.

    A successful call returns these events in its result, but a failed call has no result. The events are the result
    of `take_part`.
    """
    @functools.wraps(method)
    def call(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if self.index_worker > 0:  # the update worker reads the journal of the local worker (index 0) directly
                error.part = self.take_part()  # type: ignore[attr-defined]
            raise

    return call
