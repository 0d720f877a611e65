"""Updates that gradient workers make among themselves: the update worker asks for them, and sees that all ranks stay equal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytorchrl.errors import NoWorkersLeft, RankLostError, RanksDifferError, WorkerLostError
from pytorchrl.runtime import Future
from pytorchrl.scheme.collection.strategies import POLL_INTERVAL_S
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.gradients.rank import Candidate, Meeting
from pytorchrl.scheme.ledger import DropReason
from pytorchrl.scheme.transport.messages import Gradients, Parameters, WholeState
from pytorchrl.scheme.updates.averaging import mean_info
from pytorchrl.scheme.updates.rounds import RemoteRound, book, take_empty
from pytorchrl.terminal import get_logger

# Ranks that break off so often in a row, though none is lost, will not do better the next time.
_MAX_BROKEN_OFF = 3

logger = get_logger(__name__)


class DecentralisedRound(RemoteRound):
    """The remote GWorkers average gradients among themselves, and each applies the same update.

    All of them make an update, or none does. If a rank is lost, the others break off, and give up the items that they were
    learning from; those that are left, and a replacement if there is one, meet in the next group and take over the whole
    state of the rank that has made the most updates. What a rank applied that nobody else did then holds for all.

    Args:
        args: Those of every round with remote workers.
        fraction_workers: Share of GWorkers that must have collected their data before the rest is told to stop collecting.
        check_every: Updates after which parameters of all ranks are compared; None: never.
    """

    def __init__(self, *args: Any, fraction_workers: float = 1.0, check_every: int | None = None) -> None:
        super().__init__(*args)
        self._fraction, self._check_every = fraction_workers, check_every
        self._skip, self._used_up, self._num_prepared = False, True, 0
        self._updates = 0
        self._pulled = True  # whether the local worker has what the ranks have
        # Indices of the ranks of the present group that are not lost, in order. Between two steps all have made the same
        # updates, unless it is broken; a step begins with a new one then.
        self._ranks: list[int] = []
        self._generation, self._is_broken = 0, True
        self._begun: list[Gradients] = []  # of an update that was broken off: it was made if any rank has made it
        self._cause: RankLostError | None = None
        self._num_lost = self._num_meetings = 0  # since the last update

    def step(self) -> None:
        """One update on every rank; only statistics come here.

        Raises:
            RanksDifferError: Ranks were compared, and are not equal.
            WorkerLostError: All ranks were lost together; or what the supervisor makes of a lost one.
        """
        while not self._step():
            pass

    def _step(self) -> bool:
        if self._is_broken:
            self._meet()
        parameters = self._local.parameters
        enough = math.ceil(self._fraction * len(self._ranks) - 1e-9)
        if enough < len(self._ranks) and (self._used_up or self._skip):
            with self._accounts.part("wait"):
                self._prepare(parameters, enough)
            if self._is_broken:
                return False
        check = self._check_every is not None and (self._updates + 1) % self._check_every == 0
        for index in self._ranks:
            self._in_flight.add(index, self._workers[index].submit(
                GWorker.collect_and_grad, None, skip_remaining=self._skip, distribute_gradients=True, parameters=parameters,
                check=check))
        with self._accounts.part("wait"):
            parts = self._gather()
        self._accounts.add_send_s(self._in_flight.take_send_s())
        for part in parts:
            self._accounts.receive(part)
        if self._is_broken:
            self._begun = parts
            return False
        self._used_up = parts[0].last
        self._compare(parts)
        return self._book(parts)

    def _prepare(self, parameters: Parameters, enough: int) -> None:
        """Let every rank get its next data; once enough have theirs, the others make do with what they have."""
        self._num_prepared += 1
        for index in self._ranks:
            self._in_flight.add(index, self._workers[index].submit(
                GWorker.prepare, None, skip_remaining=self._skip, parameters=parameters, number=self._num_prepared))
        self._skip = False
        for _, part in self._gather(enough):
            self._accounts.add_part(part)

    def _gather(self, enough: int | None = None) -> list[Any]:
        """What those that were asked answer, in order, once all have, and those that are lost are replaced.

        Args:
            enough: Once so many have, the others are told to stop collecting.
        """
        answers: dict[int, Any] = {}
        start, num_asked = self._runtime.now(), len(self._in_flight)
        while len(self._in_flight) or self._supervisor.is_replacing:
            waiting = self._in_flight.owners()
            if enough is not None and num_asked - len(waiting) >= enough and self._journal.upcoming() is None:  # else it is known who
                for index in waiting:
                    self._workers[index].signal(GWorker.preempt, self._num_prepared)
            try:
                for index, answer in self._in_flight.poll(POLL_INTERVAL_S):
                    answers[index] = answer  # noqa: PERF403 - what came before an error counts
            except RankLostError as error:
                self._cause = error
                self._break_off()
            # Ranks that only wait for one that hangs are not to be taken for hung themselves.
            patience_s = 0.5 * min((self._supervisor.deadline_s(index) for index in waiting), default=math.inf)
            if self._runtime.now() - start > patience_s:
                self._break_off()
        return [answers[index] for index in sorted(answers)]

    def _book(self, parts: Sequence[Gradients]) -> bool:
        """Book an update that all ranks have made, or left out; whether there was one."""
        self._num_lost = self._num_meetings = 0
        parts = take_empty(self._accounts, parts)
        if not parts:
            self._skip = False
            return False
        info = mean_info(parts)
        self._skip = bool(info.get("skip_remaining")) and self._local.algo.skip_remaining(info)
        self._pulled = False  # also after a skipped update: normalisers may have moved
        # The ranks' statistics hold those of applying already.
        applied: dict[str, float] | None = None if parts[0].skipped else {}
        self._updates += applied is not None
        book(self._accounts, parts, self._updates - (applied is not None), info, applied)
        return True

    def _compare(self, parts: Sequence[Gradients]) -> None:
        """Raise `RanksDifferError` if ranks have told different checksums."""
        groups: dict[int | None, list[Gradients]] = {}
        for part in parts:
            groups.setdefault(part.checksum, []).append(part)
        if len(groups) > 1:
            most, *others = sorted(groups.values(), key=len, reverse=True)
            told = "; ".join(", ".join(f"GWorker {part.worker} (rank {parts.index(part)}, version {part.weights_version + 1 - part.skipped})"
                                       for part in group) for group in others)
            raise RanksDifferError(
                f"after update {self._updates + 1} the parameters of {told} are not those of the other {len(most)} ranks, "
                f"version {most[0].weights_version + 1 - most[0].skipped}, which began equal and applied the same gradients; look "
                "for what moves them elsewhere than in apply_gradients, or by anything that differs between ranks")

    # Meeting

    def _lost(self, index: int) -> None:
        super()._lost(index)
        self._num_lost += 1
        if index in self._ranks:
            self._ranks.remove(index)
        self._break_off()

    def _break_off(self) -> None:
        """The group is no more; whoever waits for its ranks need not."""
        if not self._is_broken:
            self._is_broken = True
            for index in self._ranks:
                self._workers[index].signal(GWorker.leave_group, self._generation)

    def _meet(self) -> None:
        """All that are there form a group, equal in everything that updates depend on."""
        while self._is_broken:
            self._gather()  # replacements, when they are due
            self._num_meetings = 1 if self._num_lost else self._num_meetings + 1
            self._num_lost = 0
            if self._num_meetings > _MAX_BROKEN_OFF:
                raise WorkerLostError(f"ranks broke off {_MAX_BROKEN_OFF} times in a row, though none is lost; the last time: "
                                      f"{self._cause}") from self._cause
            if self._generation and not self._ranks:
                raise NoWorkersLeft("all gradient workers that average among themselves were lost together, and the newest "
                                    "parameters with them")
            self._is_broken = not self._form_group()

    def _form_group(self) -> bool:
        """Whether all came."""
        live = [index for index in range(len(self._workers)) if index not in self._supervisor.gone]
        candidates: dict[int, Candidate] | None = self._ask({
            index: self._workers[index].submit(GWorker.give_up, self._generation) for index in live})
        if candidates is None:
            return False
        for index, candidate in candidates.items():
            self._accounts.take_account(index + 1, candidate.incarnation, candidate.ledger)
        source = max(self._ranks, key=lambda index: candidates[index].version, default=None)
        state = self._whole_state(source)
        if state is None:
            return False
        meeting = Meeting(self._generation + 1, candidates[live[0]].address, candidates[live[0]].port, len(live), self._timeout_s)
        reference, self._generation = self._runtime.put(state), meeting.generation
        joined = self._ask({index: self._workers[index].submit(
            GWorker.join_group, meeting, place, None if index == source else reference) for place, index in enumerate(live)})
        if joined is None:
            return False
        self._accounts.weight_pushes += len(live) - (source is not None)
        if source is not None:
            self._accounts.regroups += 1
            self._pulled = False
            logger.warning("%d gradient workers meet again and go on from version %d", len(live), state.version)
        self._ranks, self._skip, self._used_up = live, False, True
        self._settle(was_made=state.version > self._updates)
        return True

    def _whole_state(self, source: int | None) -> WholeState | None:
        """That of a rank, or of the local worker before there are any."""
        if source is None:
            return self._local.whole_state()
        found = self._ask({source: self._workers[source].submit(GWorker.whole_state)})
        return None if found is None else found[source]

    def _ask(self, calls: Mapping[int, Future[Any]]) -> dict[int, Any] | None:
        """What each says, by index; None if one is lost, or did not meet the others."""
        deadline_s = max(self._supervisor.deadline_s(index) for index in calls)
        answers: dict[int, Any] = {}
        for index, outcome in zip(calls, self._runtime.get_all(list(calls.values()), deadline_s), strict=True):
            if isinstance(outcome.error, RankLostError):
                self._cause = outcome.error
            elif isinstance(outcome.error, WorkerLostError):
                self._in_flight.lose(index, outcome.error)
            else:
                answers[index] = outcome.unwrap()
        return answers if len(answers) == len(calls) else None

    def _settle(self, was_made: bool) -> None:
        """Book the update that was broken off: either it holds for all now, or for none."""
        begun, self._begun = self._begun, []
        if was_made:
            used = take_empty(self._accounts, begun)
            self._accounts.apply(used, self._updates, mean_info(used) if used else {})
            self._updates += 1
            return
        for part in begun:
            self._accounts.drop(part, DropReason.WORKER_LOST)

    # Ends

    def drain(self, timeout_s: float) -> None:
        """See `RemoteRound`; all begin with new items then."""
        super().drain(timeout_s)
        self._used_up, self._skip = True, False

    @property
    def is_between_items(self) -> bool:
        """See `Round`."""
        return self._used_up or self._skip

    def _whole(self) -> WholeState:
        """That of a rank; all are equal."""
        while self._generation:
            if self._is_broken:
                self._meet()
            if (state := self._whole_state(self._ranks[0])) is not None:
                return state
        return super()._whole()

    def restore(self, whole: WholeState, workers: Sequence[dict[str, Any] | None]) -> None:
        """See `Round`; ranks are given the algorithm's state when they first meet."""
        super().restore(whole, workers)
        self._updates = whole.version

    def pull_weights(self, timeout_s: float) -> None:
        """Bring the local worker to the ranks' weights, which are equal: those of the first that answers."""
        for number, index in enumerate([] if self._pulled else self._ranks, start=1):
            outcome = self._runtime.outcome(self._workers[index].submit(GWorker.get_weights), timeout_s)
            if isinstance(outcome.error, WorkerLostError) and number < len(self._ranks):
                continue  # the next step will find out what becomes of it
            # The parameters in force are decided here, not by the ranks.
            own, of_storage = self._local.parameters
            self._local.set_weights(replace(outcome.unwrap(), parameters=own, storage_parameters=of_storage))
            self._pulled = True
            return
        if not self._pulled:
            raise NoWorkersLeft("no gradient worker is left that has the newest parameters")
