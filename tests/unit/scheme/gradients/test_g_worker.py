"""Check that an error of a remote gradient worker includes each event of the worker's journal once."""

from __future__ import annotations

import pytest

from pytorchrl.runtime.journal import Recording
from pytorchrl.scheme.gradients.g_worker import errors_carry_part


class Noting:
    """A worker that records one event in its journal each time `note` is called."""

    def __init__(self, index_worker):
        self.index_worker, self.journal = index_worker, Recording()

    def take_part(self):
        return "worker", 0, self.journal.take()

    @errors_carry_part
    def note(self, number, *, fails=False):
        """Record a number in the journal."""
        self.journal.note("noted", number)
        if fails:
            raise ValueError(number)
        return number


def test_results_neither_carry_nor_remove_events():
    worker = Noting(1)
    assert worker.note(1) == 1
    assert worker.journal.take().events == [("noted", 1)]
    assert (worker.note.__name__, worker.note.__doc__) == ("note", "Record a number in the journal.")


def test_an_error_of_a_remote_worker_carries_the_events_since_the_last_message():
    worker = Noting(2)
    worker.note(1)
    with pytest.raises(ValueError, match="2") as caught:
        worker.note(2, fails=True)
    name, incarnation, part = caught.value.part
    assert (name, incarnation, part.events) == ("worker", 0, [("noted", 1), ("noted", 2)])
    assert worker.journal.take().events == []


def test_errors_of_a_local_worker_leave_its_events_to_the_owner():
    worker = Noting(0)
    with pytest.raises(ValueError, match="1") as caught:
        worker.note(1, fails=True)
    assert not hasattr(caught.value, "part")
    assert worker.journal.take().events == [("noted", 1)]
