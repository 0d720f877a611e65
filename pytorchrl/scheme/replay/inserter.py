"""Insert rollouts into replay shards, in the collector thread."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from pytorchrl.errors import WorkerLostError
from pytorchrl.runtime import Handle, Journal, Runtime
from pytorchrl.scheme.ledger import DropReason, Ledger
from pytorchrl.scheme.replay.r_worker import RWorker
from pytorchrl.scheme.replay.shard_states import ShardState, ShardStates
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.encoder import DATA
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.requests import Requests


class Router:
    """A strategy that chooses the shard of each rollout.

    Args:
        routing: One of `ROUTINGS`.
        num_replay_workers: Number of shards; their indices start at 0.
        seed: Seed of the generator that "random" draws from.
        load: Function that returns the load of a shard, given its index; "least_loaded" chooses the shard with the
            smallest load.
    """

    def __init__(self, routing: str, num_replay_workers: int, seed: int,
                 load: Callable[[int], tuple[int, int]]) -> None:
        self._routing, self._num_replay_workers, self._load = routing, num_replay_workers, load
        self._rng = random.Random(f"routing {seed}")
        self._next = 0

    def choose(self, worker: int, free: Sequence[int], staying: Sequence[int]) -> int | None:
        """Return the index of the shard to which a rollout is added now, or None if the rollout must wait.

        With `routing="by_stream"`, all rollouts of a collection worker go to the same shard, and wait while this shard
        is being replaced. If a shard is lost and will not be replaced, its collection workers are distributed over
        the remaining shards.

        Args:
            worker: Index of the collection worker that collected the rollout.
            free: Indices of the shards that can accept another rollout.
            staying: Indices of the shards that are running or being replaced.
        """
        if self._routing == "by_stream":
            own = worker % self._num_replay_workers
            if own not in staying:
                own = staying[worker // self._num_replay_workers % len(staying)]
            return own if own in free else None
        if not free:
            return None
        if self._routing == "random":
            return self._rng.choice(free)
        if self._routing == "least_loaded":
            return min(free, key=self._load)
        place = min(free, key=lambda index: (index - self._next) % self._num_replay_workers)
        self._next = place + 1
        return place


class Inserter:
    """The sender of rollouts to replay shards. Only the collector thread uses it.

    Once a shard has confirmed a rollout, the ledger counts the rollout's env steps as resident instead of in flight.

    Args:
        handles: Handles of the shards. The handle of a replacement is stored at the index of the lost shard.
        runtime: The runtime of the shards.
        supervisor: The supervisor, which handles lost shards.
        states: The states of the shards, shared with the sampler.
        ledger: The gradient worker's ledger.
        routing: How the shard of each rollout is chosen; one of `ROUTINGS`.
        add_in_flight: Largest number of unconfirmed rollouts per shard.
        seed: Seed of random routing.
    """

    def __init__(self, handles: Sequence[Handle[RWorker]], runtime: Runtime, supervisor: Supervisor,
                 states: ShardStates, ledger: Ledger, *, routing: str, add_in_flight: int, seed: int) -> None:
        self._handles, self._supervisor, self._states = handles, supervisor, states
        self._ledger, self._add_in_flight = ledger, add_in_flight
        self._adds: Requests[ShardState] = Requests(
            runtime, supervisor, Journal(), lambda state: 0.0, lambda state: (), self._reset, lambda index: None)
        # For each shard: the rollouts in flight to the shard, in the order of its requests in `_adds`; see `invariant`.
        self._in_flight: list[deque[Rollout]] = [deque() for _ in handles]
        self._evicted, self._resident = [0] * len(handles), [0] * len(handles)
        self._router = Router(routing, len(handles), seed, lambda index: (
            states.current[index].resident, len(self._in_flight[index])))

    def invariant(self) -> bool:
        """Return whether each shard has at most `add_in_flight` rollouts, and a rollout for each of its requests.

        This holds after every event.
        """
        requests = Counter(self.owners)
        return all(requests[index] <= len(rollouts) <= self._add_in_flight
                   for index, rollouts in enumerate(self._in_flight))

    def add(self, rollout: Rollout, version: int) -> bool:
        """Send a rollout to a shard; return False if no shard can accept it now.

        Args:
            rollout: The rollout, which the ledger counts as in flight.
            version: Current version of the learner's weights; the shard stores it with the rollout.
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
        return self._router.choose(rollout.header.worker, free, staying)

    def poll(self, timeout_s: float) -> None:
        """Process the confirmations of shards that have added a rollout, and replace lost shards.

        If no confirmation has arrived, the method waits up to `timeout_s` seconds for the first.

        Raises:
            Exception: An error of a shard, or the supervisor's error for a lost shard.
        """
        while (lost := self._states.take_lost()) is not None:
            self._adds.lose(*lost)
        for index, state in self._adds.poll(timeout_s):
            self._confirm(index, state)

    def _confirm(self, index: int, state: ShardState) -> None:
        header = self._in_flight[index].popleft().header
        steps, evicted = header.num_env_steps, state.evicted - self._evicted[index]
        self._ledger.move(steps, "in_flight", "resident")
        self._ledger.move(evicted, "resident", "evicted")
        self._evicted[index] = state.evicted
        self._resident[index] += steps - evicted
        self._states.confirm(replace(header, traffic={**header.traffic, DATA: state.traffic}))
        self._states.update(index, self._states.incarnation(index), state)
        self._states.changed.set()

    def _reset(self, index: int) -> None:
        """Record that a shard is lost: its env steps, both resident and in flight, are counted as dropped."""
        in_flight = sum(rollout.header.num_env_steps for rollout in self._in_flight[index])
        self._ledger.drop(in_flight, "in_flight", DropReason.WORKER_LOST)
        self._ledger.drop(self._resident[index], "resident", DropReason.WORKER_LOST)
        self._in_flight[index].clear()
        self._evicted[index] = self._resident[index] = 0
        self._states.reset(index)
        self._states.changed.set()

    def lose(self, index: int, error: WorkerLostError) -> None:
        """Drop the env steps of a shard that another component has found to be lost, and notify the supervisor."""
        self._adds.lose(index, error)

    @property
    def owners(self) -> list[int]:
        """For each rollout in flight, the index of the shard that receives it."""
        return self._adds.owners()

    def restore(self, index: int, state: ShardState) -> None:
        """Set the counts of resident and evicted env steps from the state of a restored shard."""
        self._evicted[index], self._resident[index] = state.evicted, state.resident
        self._states.update(index, self._states.incarnation(index), state)

    def finish(self, timeout_s: float) -> None:
        """Process the confirmations that arrive within `timeout_s` seconds.

        Rollouts that are still unconfirmed remain in flight in the ledger.
        """
        owners = self.owners
        for index, outcome in zip(owners, self._adds.finish(timeout_s), strict=True):
            if outcome.value is not None:
                self._confirm(index, outcome.value)
