"""Insert rollouts into replay shards, in the collector thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from pytorchrl.errors import WorkerLostError
from pytorchrl.runtime import Handle, Journal, Runtime
from pytorchrl.scheme.ledger import DropReason, Ledger
from pytorchrl.scheme.replay.r_worker import RWorker
from pytorchrl.scheme.replay.routing import Router
from pytorchrl.scheme.replay.shard_states import ShardState, ShardStates
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.encoder import DATA
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.requests import Requests


class Inserter:
    """Sends rollouts to shards, and books them once a shard has confirmed them. Used by the collector thread only.

    Args:
        handles: Handles of the shards; replacements take the place of lost ones.
        runtime: The runtime of the shards.
        supervisor: Decides about lost shards.
        states: Shared with the sampler.
        ledger: The gradient worker's ledger.
        routing: Choice of the shard for each rollout, one of `routing.ROUTINGS`.
        add_in_flight: Largest number of rollouts that a shard has not confirmed.
        seed: Seed of random routing.
    """

    def __init__(self, handles: Sequence[Handle[RWorker]], runtime: Runtime, supervisor: Supervisor,
                 states: ShardStates, ledger: Ledger, *, routing: str, add_in_flight: int, seed: int) -> None:
        self._handles, self._supervisor, self._states = handles, supervisor, states
        self._ledger, self._add_in_flight = ledger, add_in_flight
        self._adds: Requests[ShardState] = Requests(
            runtime, supervisor, Journal(), lambda state: 0.0, lambda state: (), self._reset, lambda index: None)
        # Invariant between two calls: one rollout for each request in `_adds`, in the same order for each shard.
        self._in_flight: list[deque[Rollout]] = [deque() for _ in handles]
        self._evicted, self._resident = [0] * len(handles), [0] * len(handles)
        self._router = Router(routing, len(handles), seed, lambda index: (
            states.current[index].resident, len(self._in_flight[index])))

    def add(self, rollout: Rollout, version: int) -> bool:
        """Send a rollout, in flight in the ledger, to a shard that has room; return False if none has.

        Args:
            rollout: The rollout.
            version: The learner's version.
        """
        index = self._choose(rollout)
        if index is None:
            return False
        self._in_flight[index].append(rollout)
        self._adds.add(index, self._handles[index].submit(RWorker.add, rollout, version))
        return True

    def _choose(self, rollout: Rollout) -> int | None:
        free = [index for index, adds in enumerate(self._in_flight)
                if len(adds) < self._add_in_flight and index not in self._supervisor.gone]
        ignored = self._supervisor.gone if self._supervisor.ignores_lost else ()
        staying = [index for index in range(len(self._handles)) if index not in ignored]
        return self._router.choose(rollout.worker, free, staying)

    def poll(self, timeout_s: float) -> None:
        """Book the confirmations that have arrived, waiting at most `timeout_s` for the first; replace lost shards.

        Raises:
            Exception: An error that a shard raised, or the supervisor's for a lost one.
        """
        lost = self._states.lost
        while lost:
            index, incarnation, error = lost.popleft()
            if incarnation == self._states.incarnation(index):
                self._adds.lose(index, error)
        for index, state in self._adds.poll(timeout_s):
            self._confirm(index, state)

    def _confirm(self, index: int, state: ShardState) -> None:
        rollout = self._in_flight[index].popleft()
        steps, evicted = rollout.num_env_steps, state.evicted - self._evicted[index]
        self._ledger.move(steps, "in_flight", "resident")
        self._ledger.move(evicted, "resident", "evicted")
        self._evicted[index] = state.evicted
        self._resident[index] += steps - evicted
        self._states.confirm(replace(rollout, data=None, traffic={**rollout.traffic, DATA: state.traffic}))
        self._states.update(index, self._states.incarnation(index), state)
        self._states.changed.set()

    def _reset(self, index: int) -> None:
        """Drop everything in a lost shard and in flight to it from the ledger."""
        in_flight = sum(rollout.num_env_steps for rollout in self._in_flight[index])
        self._ledger.drop(in_flight, "in_flight", DropReason.WORKER_LOST)
        self._ledger.drop(self._resident[index], "resident", DropReason.WORKER_LOST)
        self._in_flight[index].clear()
        self._evicted[index] = self._resident[index] = 0
        self._states.reset(index)
        self._states.changed.set()

    def lose(self, index: int, error: WorkerLostError) -> None:
        """Handle a shard that was found lost elsewhere."""
        self._adds.lose(index, error)

    @property
    def owners(self) -> list[int]:
        """The shard of each rollout in flight."""
        return self._adds.owners()

    def restore(self, index: int, state: ShardState) -> None:
        """Continue the books of a shard whose contents were loaded."""
        self._evicted[index], self._resident[index] = state.evicted, state.resident
        self._states.update(index, self._states.incarnation(index), state)

    def finish(self, timeout_s: float) -> None:
        """Book the confirmations that arrive within `timeout_s`; the other rollouts stay in flight in the ledger."""
        owners = self.owners
        for index, outcome in zip(owners, self._adds.finish(timeout_s), strict=True):
            if outcome.value is not None:
                self._confirm(index, outcome.value)
