"""Check that an error of a remote gradient worker includes each event of the worker's journal once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytorchrl.runtime.journal import Recording
from pytorchrl.scheme.gradients.g_worker import GWorker, errors_carry_part
from pytorchrl.scheme.gradients.worker_stats import WorkerStats
from pytorchrl.scheme.ledger import DropReason, Ledger
from pytorchrl.scheme.transport.encoder import Traffic


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


def test_only_the_announced_rollout_is_preempted():
    """Check signals that arrive too late or too early for the rollout that `prepare` collects."""
    asked, loaded = [], []
    worker = SimpleNamespace(
        _preparing=0, _plan=SimpleNamespace(least_steps=2), _begin_request=lambda *_: None, take_part=lambda: None,
        local_worker=SimpleNamespace(preempt_running=asked.append), index_worker=1,
        batch_source=SimpleNamespace(is_loaded=False, load=lambda: loaded.append(worker._preparing)),
        storage=SimpleNamespace(advantage_moments=lambda: None))
    for number in (1, 2):
        GWorker.preempt(worker, number)  # overtakes the request
        assert asked == [2] * (number - 1)
        GWorker.prepare(worker, number=number)
        for other in (number - 1, number, number + 1):
            GWorker.preempt(worker, other)
        assert asked == [2] * number
    assert loaded == [1, 2]  # the number is known before the collection begins


def test_moments_are_stored_once_and_shared_with_the_last_gradient_of_a_train_batch():
    stored, shares = [], []
    worker = SimpleNamespace(
        stats=WorkerStats(lambda: 0.0), _gradients=SimpleNamespace(used=SimpleNamespace(last=False)),
        _group=SimpleNamespace(store=stored.append, shared=lambda last: (shares.append(last), ("all",))[1]),
        apply_gradients=lambda grads, moments: {"moments": moments})
    worker.stats.moments = ["own"]
    assert GWorker._apply_mean(worker, [None, None]) == ([], {})
    assert GWorker._apply_mean(worker, ["gradient"]) == (None, {"moments": ("all",)})
    worker._gradients.used.last = True
    GWorker._apply_mean(worker, ["gradient"])
    assert stored == [["own"], [], []]
    assert shares == [False, True]


def test_moments_of_a_skipped_train_batch_are_merged():
    merged, skipped = [], []
    worker = SimpleNamespace(
        batch_source=SimpleNamespace(skip_remaining=skipped.append), local_worker=SimpleNamespace(
            merge_moments=merged.append), _group=SimpleNamespace(is_member=True, share=lambda: ("of all ranks",)))
    GWorker.skip_remaining(worker)
    worker._group.is_member = False
    GWorker.skip_remaining(worker)
    assert (merged, skipped) == ([("of all ranks",)], [DropReason.EARLY_STOP] * 2)


def test_a_report_adds_the_traffic_of_weights_since_the_last_report():
    messages = [Traffic(decodes=2), Traffic(decodes=4)]
    worker = SimpleNamespace(
        stats=SimpleNamespace(traffic={"weights": Traffic(decodes=1)}, take=lambda *_: dict(worker.stats.traffic)),
        local_worker=SimpleNamespace(take_weights_traffic=lambda: messages.pop(0)), collector=None, batch_source=None,
        shards=None)
    assert [GWorker.report(worker)["weights"].decodes for _ in range(2)] == [3, 7]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_drain_discards_moments_of_rollouts_that_it_discards(is_kept):
    """Check that data in replay are kept, and so are their moments."""
    done, ledger = [], Ledger()
    ledger.collect(5)
    worker = SimpleNamespace(
        collector=SimpleNamespace(drain=lambda *given: done.append(given)), ledger=ledger, _incarnation=3,
        storage=SimpleNamespace(provides=SimpleNamespace(is_kept=is_kept)),
        batch_source=SimpleNamespace(clear=lambda: done.append("cleared")), _gradients=SimpleNamespace(batch="batch"),
        _group=SimpleNamespace(discard=lambda: done.append("discarded")))
    incarnation, snapshot = GWorker.drain(worker, 2, 9.0)
    assert (incarnation, snapshot.dropped) == (3, {"shutdown": 5})
    assert done == [(2, 9.0), *([] if is_kept else ["cleared", "discarded"])]
    assert worker._gradients.batch == ("batch" if is_kept else None)
