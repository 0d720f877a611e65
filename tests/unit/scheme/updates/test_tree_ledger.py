"""Check that the ledger of the tree is the sum of all workers' ledgers, even after workers are lost or closed."""

from __future__ import annotations

from pytorchrl.scheme.ledger import DropReason, LedgerSnapshot
from pytorchrl.scheme.updates.tree_ledger import TreeLedger


def test_steps_of_a_gradient_are_in_flight_until_it_is_applied():
    ledger = TreeLedger()
    ledger.report(1, 0, LedgerSnapshot(collected=10, queued=6, sent=4))
    assert ledger.total().check().in_flight == 4  # the gradient is in transit
    ledger.receive(4)
    assert (ledger.total().check().in_flight, ledger.env_steps) == (4, 0)
    ledger.consume(4, 8)
    total = ledger.total().check()
    assert (total.in_flight, total.consumed_unique, total.consumed, total.queued) == (0, 4, 8, 6)
    assert (ledger.collected, ledger.env_steps) == (10, 4)


def test_steps_in_replay_count_as_usable_steps():
    ledger = TreeLedger()
    ledger.report(1, 0, LedgerSnapshot(collected=10, resident=5, evicted=2, queued=3))
    assert ledger.env_steps == 7


def test_steps_of_a_lost_worker_are_dropped_and_its_replacement_starts_at_zero():
    ledger = TreeLedger()
    ledger.report(1, 0, LedgerSnapshot(collected=10, queued=2, resident=3, in_flight=1, evicted=4))
    ledger.lose(1)
    ledger.report(1, 1, LedgerSnapshot(collected=5, queued=5))
    total = ledger.total().check()
    assert (total.collected, total.queued, total.resident, total.evicted) == (15, 5, 0, 4)
    assert total.dropped == {"worker_lost": 6}
    ledger.close(1, LedgerSnapshot(collected=7, dropped={"shutdown": 7}))
    assert ledger.total().check().dropped == {"worker_lost": 6, "shutdown": 7}


def test_a_final_ledger_has_nothing_in_flight():
    ledger = TreeLedger()
    ledger.report(1, 0, LedgerSnapshot(collected=10, sent=10))
    ledger.receive(6)
    ledger.drop(2, DropReason.NAN)
    final = ledger.settle().check()
    assert (final.in_flight, final.dropped) == (0, {"nan": 2, "shutdown": 8})


def test_a_restored_ledger_keeps_lost_workers_in_later_checkpoints():
    ledger = TreeLedger()
    ledger.report(1, 0, LedgerSnapshot(collected=10, queued=4, sent=6))
    ledger.receive(6)
    ledger.consume(6, 6)
    ledger.lose(1)
    ledger.report(1, 1, LedgerSnapshot(collected=3, queued=3))
    live = {1: LedgerSnapshot(collected=3, dropped={"shutdown": 3})}
    for _ in range(2):
        state, ledger = ledger.state(), TreeLedger()
        ledger.restore(LedgerSnapshot(**state["own"]), LedgerSnapshot(**state["lost"]), live)
        total = ledger.total().check()
        assert (total.collected, total.consumed_unique, total.dropped) == (13, 6, {"worker_lost": 4, "shutdown": 3})
        assert ledger.consumed_since_start == 0
