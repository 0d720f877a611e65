"""Check `ShardStates`, an object that the collector thread and the learner thread share."""

from __future__ import annotations

import threading

from pytorchrl.errors import WorkerLostError
from pytorchrl.scheme.replay.shard_states import ShardState, ShardStates
from tests.unit.scheme.replay.numbered import rollout


def test_only_newer_states_of_the_current_incarnation_count():
    states = ShardStates(2, threading.Event(), threading.Event())
    states.update(0, 0, ShardState(answers=2, mass=2.0))
    states.update(0, 0, ShardState(answers=1, mass=1.0))
    states.update(1, 1, ShardState(answers=9, mass=9.0))
    assert [state.mass for state in states.current] == [2.0, 0.0]


def test_late_answers_do_not_give_mass_to_a_suspended_shard():
    states, error = ShardStates(1, threading.Event(), threading.Event()), WorkerLostError("hangs")
    states.update(0, 0, ShardState(answers=1, mass=1.0))
    states.suspend(0, 0, error)
    states.update(0, 0, ShardState(answers=2, mass=2.0))
    assert states.current[0].mass == 0.0
    states.suspend(0, 0, WorkerLostError("hangs again"))
    assert states.invariant()
    assert (states.take_lost(), states.take_lost()) == ((0, error), None)  # one entry for each shard
    states.reset(0)
    states.update(0, 1, ShardState(answers=1, mass=3.0))
    assert states.current[0].mass == 3.0
    assert states.incarnation(0) == 1


def test_a_lost_shard_that_is_reset_is_not_reported():
    states = ShardStates(2, threading.Event(), threading.Event())
    states.suspend(1, 0, WorkerLostError("hangs"))
    states.reset(1)
    states.suspend(1, 0, WorkerLostError("hangs, but was replaced"))
    assert states.take_lost() is None


def test_the_largest_number_of_waiting_headers_is_recorded():
    states, sizes = ShardStates(1, threading.Event(), threading.Event()), (2, 3, 1)
    for size in sizes:
        for number in range(size):
            states.confirm(rollout(number).header)
        assert len(states.take_headers()) == size
    assert states.peak == max(sizes)


def test_a_lost_shard_with_mass_breaks_the_invariant():
    states = ShardStates(2, threading.Event(), threading.Event())
    states.suspend(1, 0, WorkerLostError("hangs"))
    states._states[1] = ShardState(mass=1.0)
    assert not states.invariant()
