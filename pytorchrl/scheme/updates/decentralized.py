"""Decentralized updates: gradient workers average gradients among themselves, and each applies the mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from typing_extensions import override

from pytorchrl.errors import NoWorkersLeft, RankLostError, RanksDifferError, WorkerLostError
from pytorchrl.runtime import Future
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.gradients.process_group import Candidate, Meeting
from pytorchrl.scheme.ledger import DropReason
from pytorchrl.scheme.transport.messages import Gradients, Parameters, WholeState
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S
from pytorchrl.scheme.updates.averaging import mean_info
from pytorchrl.scheme.updates.remote import Collaborators, RemoteUpdates
from pytorchrl.scheme.updates.strategy import WorkerState, discard_empty, record_update
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.untyped import Answer

# Number of times in a row that the group may break up without the loss of a rank. One more breakup ends the run with an
# error.
_MAX_BREAKUPS = 3

R = TypeVar("R")

logger = get_logger(__name__)


class DecentralizedUpdates(RemoteUpdates):
    """Updates by the remote gradient workers (ranks) themselves: they average gradients, and each applies the mean.

    An update is made either by all ranks or by none. If a rank is lost, the remaining ranks abort the update and drop
    their train batches. They then form a new group, which includes the replacement of the lost rank if there is one.
    All ranks of the new group load the state of the rank that has made the most updates. Therefore, if some ranks had
    already made the aborted update, the other ranks receive this update with the state.

    Args:
        tree: The components of the tree that the strategy uses.
        fraction_workers: Fraction of ranks that must have collected their data before the other ranks are signaled to
            stop collecting.
    """

    check_interval: int | None = 100
    """Number of updates between two comparisons of the ranks' parameters; None: no comparisons."""

    def __init__(self, tree: Collaborators, fraction_workers: float = 1.0) -> None:
        super().__init__(tree)
        self._fraction = fraction_workers
        self._skip, self._used_up, self._num_prepared = False, True, 0
        self._updates = 0
        self._pulled = True  # whether the local worker has the state of the ranks
        # Sorted indices of the live ranks in the current group. Between two calls of `step`, these ranks have made the
        # same updates, unless the group is broken.
        self._ranks: list[int] = []
        self._generation, self._is_broken = 0, True
        self._aborted: list[Gradients] = []  # gradients of an aborted update; some ranks may have applied it
        self._cause: RankLostError | None = None
        self._num_lost = self._num_breakups = 0  # counts since the last update

    @property
    def ranks(self) -> list[int]:
        """Indices of the workers that form the current group; empty from its breakup until a new group is formed."""
        return [] if self._is_broken else list(self._ranks)

    def step(self) -> None:
        """Make one update on every rank; only statistics are sent to the update worker.

        Raises:
            RanksDifferError: The parameters of the ranks were compared and differ.
            WorkerLostError: All ranks were lost together, a lost rank is not replaced, or the ranks could not form a
                group.
        """
        while not self._step():
            pass

    def _step(self) -> bool:
        """Try to make an update; return False if `step` has to try again."""
        if self._is_broken:
            self._form_new_group()
        parameters = self._local.parameters
        enough = math.ceil(self._fraction * len(self._ranks) - 1e-9)
        if enough < len(self._ranks) and (self._used_up or self._skip):
            with self._statistics.timed("wait"):
                self._prepare(parameters, enough)
            if self._is_broken:
                return False
        check = self.check_interval is not None and (self._updates + 1) % self.check_interval == 0
        for index in self._ranks:
            self.in_flight.add(index, self._workers[index].submit(
                GWorker.collect_and_grad, None, skip_remaining=self._skip, distribute_gradients=True,
                parameters=parameters, check=check))
        with self._statistics.timed("wait"):
            gradients = self._gather()
        self._statistics.add_send_s(self.in_flight.take_send_s())
        for gradient in gradients:
            self._statistics.receive(gradient)
        if self._is_broken:
            self._aborted = gradients
            return False
        self._used_up = gradients[0].last
        self._compare(gradients)
        return self._book(gradients)

    def _prepare(self, parameters: Parameters, enough: int) -> None:
        """Make each rank collect a train batch. Once `enough` ranks have finished, signal the others to stop early."""
        self._num_prepared += 1
        for index in self._ranks:
            self.in_flight.add(index, self._workers[index].submit(
                GWorker.prepare, None, skip_remaining=self._skip, parameters=parameters, number=self._num_prepared))
        self._skip = False
        for _, part in self._gather(enough):
            self._statistics.add_journal_part(part)

    def _gather(self, enough: int | None = None) -> list[Answer]:
        """Wait until all requests are answered and lost workers are replaced; return the answers in worker order.

        Args:
            enough: Number of answers after which workers without an answer are signaled to stop collecting; None: no
                signal.
        """
        answers: dict[int, Answer] = {}
        start, num_requests = self._runtime.now(), len(self.in_flight)
        while len(self.in_flight) or self.supervisor.is_replacing:
            waiting = self.in_flight.owners()
            # In a replayed run, the journal determines which workers end their collection early.
            if enough is not None and num_requests - len(waiting) >= enough and self._journal.upcoming() is None:
                for index in waiting:
                    self._workers[index].signal(GWorker.preempt, self._num_prepared)
            try:
                for index, answer in self.in_flight.poll(POLL_INTERVAL_S):
                    answers[index] = answer  # noqa: PERF403 - answers before an error are kept
            except RankLostError as error:
                self._cause = error
                self._break_group()
            # If a rank hangs, break up the group before the ranks that wait for it exceed the supervisor's deadline.
            patience_s = 0.5 * min((self.supervisor.deadline_s(index) for index in waiting), default=math.inf)
            if self._runtime.now() - start > patience_s:
                self._break_group()
        return [answers[index] for index in sorted(answers)]

    def _book(self, gradients: Sequence[Gradients]) -> bool:
        """Record the update that all ranks have made or skipped; return False if all of their gradients were empty."""
        self._num_lost = self._num_breakups = 0
        gradients = discard_empty(self._statistics, gradients)
        if not gradients:
            self._skip = False
            return False
        info = mean_info(gradients)
        self._skip = bool(info.get("skip_remaining")) and self._local.algo.skip_remaining(info)
        self._pulled = False  # even if the update is skipped, normalizers may have changed
        # The ranks applied the update themselves, so `info` already contains the statistics of applying it.
        applied: dict[str, float] | None = None if gradients[0].skipped else {}
        self._updates += applied is not None
        record_update(self._statistics, gradients, self._updates - (applied is not None), info, applied)
        return True

    def _compare(self, gradients: Sequence[Gradients]) -> None:
        """Raise `RanksDifferError` if the ranks sent different checksums of their parameters."""
        groups: dict[int | None, list[Gradients]] = {}
        for gradient in gradients:
            groups.setdefault(gradient.checksum, []).append(gradient)
        if len(groups) > 1:
            most, *others = sorted(groups.values(), key=len, reverse=True)
            different = "; ".join(", ".join(
                f"GWorker {gradient.worker} (rank {gradients.index(gradient)}, version "
                f"{gradient.weights_version + 1 - gradient.skipped})" for gradient in group) for group in others)
            raise RanksDifferError(
                f"after update {self._updates + 1} the parameters of {different} differ from those of the other "
                f"{len(most)} ranks, version {most[0].weights_version + 1 - most[0].skipped}, although all started "
                "with equal parameters and applied the same gradients; look for code that changes parameters outside "
                "apply_gradients, or that depends on the rank")

    # Forming groups

    def _on_lost(self, index: int) -> None:
        super()._on_lost(index)
        self._num_lost += 1
        if index in self._ranks:
            self._ranks.remove(index)
        self._break_group()

    def _break_group(self) -> None:
        """Break up the group, and signal its ranks to leave it, so that no rank waits for another."""
        if not self._is_broken:
            self._is_broken = True
            for index in self._ranks:
                self._workers[index].signal(GWorker.leave_group, self._generation)

    def _form_new_group(self) -> None:
        """Form a group of all live workers, and give all of them the same state."""
        while self._is_broken:
            self._gather()  # wait for replacements
            self._num_breakups = 1 if self._num_lost else self._num_breakups + 1
            self._num_lost = 0
            if self._num_breakups > _MAX_BREAKUPS:
                raise WorkerLostError(
                    f"the group of gradient workers broke up {_MAX_BREAKUPS} times in a row, although no worker was "
                    f"lost; the last cause: {self._cause}") from self._cause
            if self._generation and not self._ranks:
                raise NoWorkersLeft(
                    "all gradient workers that average among themselves were lost together, and the newest parameters "
                    "with them")
            self._is_broken = not self._try_to_form_group()

    def _try_to_form_group(self) -> bool:
        """Try to form a group of all live workers; return whether all of them joined it."""
        live = [index for index in range(len(self._workers)) if index not in self.supervisor.gone]
        candidates: dict[int, Candidate] | None = self._ask({
            index: self._workers[index].submit(GWorker.leave_and_propose, self._generation) for index in live})
        if candidates is None:
            return False
        for index, candidate in candidates.items():
            self._statistics.tree_ledger.report(index + 1, candidate.incarnation, candidate.ledger)
        source = max(self._ranks, key=lambda index: candidates[index].version, default=None)
        state = self._state_of(source)
        if state is None:
            return False
        meeting = Meeting(
            self._generation + 1, candidates[live[0]].address, candidates[live[0]].port, len(live), self._timeout_s)
        reference, self._generation = self._runtime.put(state), meeting.generation
        joined = self._ask({index: self._workers[index].submit(
            GWorker.join_group, meeting, place, None if index == source else reference)
            for place, index in enumerate(live)})
        if joined is None:
            return False
        self._statistics.counters.weight_pushes += len(live) - (source is not None)
        if source is not None:
            self._statistics.counters.regroups += 1
            self._pulled = False
            logger.warning("%d gradient workers form a new group, from version %d", len(live), state.version)
        self._ranks, self._skip, self._used_up = live, False, True
        self._book_aborted(was_made=state.version > self._updates)
        return True

    def _state_of(self, source: int | None) -> WholeState | None:
        """Return the state of worker `source` (None: the local worker); return None if the worker is lost."""
        if source is None:
            return self._local.whole_state()
        found = self._ask({source: self._workers[source].submit(GWorker.whole_state)})
        return None if found is None else found[source]

    def _ask(self, calls: Mapping[int, Future[R]]) -> dict[int, R] | None:
        """Return the workers' answers by index; None if a worker is lost or communication among them fails."""
        deadline_s = max(self.supervisor.deadline_s(index) for index in calls)
        answers: dict[int, R] = {}
        for index, outcome in zip(calls, self._runtime.get_all(list(calls.values()), deadline_s), strict=True):
            if isinstance(outcome.error, RankLostError):
                self._cause = outcome.error
            elif isinstance(outcome.error, WorkerLostError):
                self.in_flight.lose(index, outcome.error)
            else:
                answers[index] = outcome.unwrap()
        return answers if len(answers) == len(calls) else None

    def _book_aborted(self, was_made: bool) -> None:
        """Record the env steps of the aborted update as used or as dropped.

        Args:
            was_made: Whether the state that all ranks have loaded contains the update, so that its env steps were used.
        """
        aborted, self._aborted = self._aborted, []
        if was_made:
            used = discard_empty(self._statistics, aborted)
            self._statistics.apply(used, self._updates, mean_info(used) if used else {})
            self._updates += 1
            return
        for gradient in aborted:
            self._statistics.drop(gradient, DropReason.WORKER_LOST)

    # Drains and saved states

    def drain(self, timeout_s: float) -> None:
        """Leave nothing in flight or queued (see `RemoteUpdates.drain`); the next step starts new train batches."""
        super().drain(timeout_s)
        self._used_up, self._skip = True, False

    @property
    @override
    def is_between_train_batches(self) -> bool:
        return self._used_up or self._skip

    def _whole_state(self) -> WholeState:
        """Return the state of a rank; the states of all ranks are equal."""
        while self._generation:
            if self._is_broken:
                self._form_new_group()
            if (state := self._state_of(self._ranks[0])) is not None:
                return state
        return super()._whole_state()

    def restore(self, whole: WholeState, workers: Sequence[WorkerState | None]) -> None:
        """Restore a saved state. Ranks receive the saved state of the algorithm when they form their first group."""
        super().restore(whole, workers)
        self._updates = whole.version

    def pull_weights(self, timeout_s: float) -> None:
        """Copy weights to the local worker from the first rank that answers; all ranks have the same weights."""
        for number, index in enumerate([] if self._pulled else self._ranks, start=1):
            outcome = self._runtime.outcome(self._workers[index].submit(GWorker.get_weights), timeout_s)
            if isinstance(outcome.error, WorkerLostError) and number < len(self._ranks):
                continue  # the next step handles the lost rank
            # The local worker, not the ranks, determines the values of parameters such as the learning rate.
            own, of_storage = self._local.parameters
            self._local.set_weights(replace(outcome.unwrap(), parameters=own, storage_parameters=of_storage))
            self._pulled = True
            return
        if not self._pulled:
            raise NoWorkersLeft("no gradient worker with the newest parameters is left")
