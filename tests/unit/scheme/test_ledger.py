from __future__ import annotations

import threading

import pytest

from pytorchrl.errors import LedgerError
from pytorchrl.scheme.ledger import DropReason, Ledger, LedgerSnapshot, merge


def test_steps_move_from_place_to_place():
    ledger = Ledger()
    ledger.collect(100)
    ledger.move(80, "in_flight", "queued")
    ledger.move(50, "queued", "consumed_unique")
    ledger.drop(10, "queued", DropReason.POLICY_LAG)
    ledger.consume(150)
    snapshot = ledger.snapshot()
    assert (snapshot.collected, snapshot.in_flight, snapshot.queued, snapshot.consumed_unique) == (100, 20, 20, 50)
    assert snapshot.consumed == 150
    assert snapshot.dropped == {"policy_lag": 10}
    assert snapshot.check() is snapshot


def test_drop_all_drops_all_steps_in_flight_or_queued():
    ledger = Ledger()
    ledger.collect(10)
    ledger.move(4, "in_flight", "queued")
    ledger.move(1, "queued", "sent")
    ledger.drop_all(DropReason.SHUTDOWN)
    snapshot = ledger.snapshot()
    assert (snapshot.in_flight, snapshot.queued, snapshot.sent, snapshot.dropped) == (0, 0, 1, {"shutdown": 9})


@pytest.mark.parametrize(("snapshot", "imbalance"), [
    (LedgerSnapshot(collected=10, consumed_unique=9), 1),
    (LedgerSnapshot(collected=10, consumed_unique=10, dropped={"nan": 1}), -1),
    (LedgerSnapshot(collected=10, queued=11, in_flight=-1), 0),
])
def test_a_wrong_ledger_is_refused(snapshot, imbalance):
    assert snapshot.imbalance == imbalance
    with pytest.raises(LedgerError):
        snapshot.check()


def test_collected_steps_can_be_counted_by_collectors():
    ledger = Ledger()
    ledger.collect(10)
    ledger.move(10, "in_flight", "queued")
    assert ledger.snapshot(10).imbalance == 0
    assert ledger.snapshot(12).imbalance == 2  # two collected steps never arrived


def test_public_form_lists_every_drop_reason():
    public = LedgerSnapshot(collected=3, dropped={"shutdown": 3}).to_dict()
    assert set(public) == {"collected", "in_flight", "queued", "consumed_unique", "consumed", "resident", "evicted",
                           "dropped"}
    assert public["dropped"] == {reason.value: 3 if reason is DropReason.SHUTDOWN else 0 for reason in DropReason}


def test_merge_adds_workers_and_counts_sent_steps_as_in_flight():
    worker = Ledger()
    worker.collect(30)
    worker.move(30, "in_flight", "queued")
    worker.move(12, "queued", "sent")
    own = Ledger()  # ledger of the update worker, which received 8 of the 12 steps and used 5 of them
    own.move(8, "sent", "in_flight")
    own.move(5, "in_flight", "consumed_unique")
    own.consume(5)
    total = merge([worker.snapshot(), LedgerSnapshot(collected=2, dropped={"nan": 2})], own.snapshot()).check()
    assert (total.collected, total.in_flight, total.queued, total.consumed_unique) == (32, 3 + 4, 18, 5)
    assert total.dropped == {"nan": 2}


def test_every_snapshot_balances_while_threads_move_steps():
    ledger, done = Ledger(), threading.Event()

    def work():
        while not done.is_set():
            ledger.collect(3)
            ledger.move(3, "in_flight", "queued")
            ledger.move(2, "queued", "consumed_unique")
            ledger.drop(1, "queued", DropReason.NAN)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            ledger.snapshot().check()
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("change", [
    lambda ledger: ledger.collect(7), lambda ledger: ledger.move(3, "queued", "resident"),
    lambda ledger: ledger.drop(2, "in_flight", DropReason.NAN), lambda ledger: ledger.consume(5),
    lambda ledger: ledger.restore(LedgerSnapshot(collected=9, queued=4, in_flight=3, dropped={"nan": 2})),
    lambda ledger: ledger.snapshot(1000), lambda ledger: ledger.drop_all(DropReason.SHUTDOWN)],
    ids=["collect", "move", "drop", "consume", "restore", "another count", "drop all"])
def test_a_snapshot_shows_its_own_time(change):
    """Compare snapshots before and after a change, of a ledger whose snapshot was already taken, with a new ledger."""
    def fill():
        ledger = Ledger()
        ledger.collect(20)
        ledger.move(8, "in_flight", "queued")
        ledger.drop(1, "queued", DropReason.NAN)
        return ledger
    ledger, fresh = fill(), fill()
    before = ledger.snapshot()
    kept = before._replace(dropped=dict(before.dropped))
    change(ledger)
    change(fresh)
    assert before == kept  # a snapshot does not change
    assert ledger.snapshot() == fresh.snapshot() == ledger.snapshot()
    assert (ledger.snapshot() == before) == (ledger["collected"] == 20 and ledger["consumed"] == 0 and ledger.total(
        "in_flight", "queued") == 19 and ledger["resident"] == 0)


def test_a_restored_ledger_has_only_the_restored_counts():
    ledger, saved = Ledger(), LedgerSnapshot(collected=9, queued=4, in_flight=3, dropped={"nan": 2})
    ledger.collect(20)
    ledger.drop(1, "in_flight", DropReason.NAN)
    ledger.drop(1, "in_flight", DropReason.SHUTDOWN)
    ledger.restore(saved)
    assert ledger.snapshot() == saved


def test_uses_are_counted_by_the_root_of_the_tree():
    own, parts = LedgerSnapshot(consumed=7, consumed_unique=4), [LedgerSnapshot(consumed=100, collected=4)]
    assert (merge(parts, own).consumed, merge(parts, own).consumed_unique) == (7, 4)
