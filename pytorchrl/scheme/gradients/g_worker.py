"""The gradient worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytorchrl.agent.data import Batch
from pytorchrl.agent.multi.data import samples_by_policy
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.options import option
from pytorchrl.errors import CallOrderError, NonFiniteUpdateError
from pytorchrl.runtime import Handle, Runtime, ThreadRuntime, WorkersPart
from pytorchrl.scheme.base.worker import ASYNC, Communication, Execution, Worker, check_count
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.collector_thread import CollectorThread, HeldError
from pytorchrl.scheme.gradients import microbatch as accumulator
from pytorchrl.scheme.gradients import saved
from pytorchrl.scheme.gradients.minibatch_buffer import Item, Part
from pytorchrl.scheme.gradients.rank import Candidate, Meeting, Rank, propose_address
from pytorchrl.scheme.gradients.worker_stats import Report, Vectors, not_finite, timed, with_part
from pytorchrl.scheme.ledger import DropReason, Ledger, LedgerSnapshot
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet
from pytorchrl.scheme.replay.shards import Shards
from pytorchrl.scheme.supervision.bad_batches import BadBatches, check_directory
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.encoder import GRADS, Compression, Encoder, Wanted
from pytorchrl.scheme.transport.messages import Gradients, Moments, Parameters, Weights, WholeState
from pytorchrl.terminal import get_logger

# A replaced GWorker's collection workers count their incarnations from a multiple of this, so that none is used twice.
_INCARNATIONS = 64
# stop() gives workers this long to end their running call; the whole of stop() promises 10 s.
_STOP_TIMEOUT_S = 5.0

__all__ = ["CollectorThread", "GWorker"]

logger = get_logger(__name__)


class GWorker(Worker):
    """Computes gradients from the data that its collection workers bring.

    Args:
        index_worker: 0 is local to the update worker, 1..N are remote.
        col_workers_factory: Makes its set of collection workers.
        col_communication: "synchronous" or "asynchronous" collection.
        compress_grads_to_send: What becomes of gradients on their way; see `Scheme`.
        col_execution: "Central" or "Parallel" collection.
        col_fraction_workers: Share of collection workers that ends a synchronous round.
        initial_weights: Weights to start from.
        device: "cpu" or "cuda:N" for its computation; None is the CPU.
        runtime: Where its remote collection workers run.
        collects: False for the one that only serves parameters and applies gradients.
        fraction_samples, col_in_flight, queue_size, queue_timeout_s, broadcast_interval, collector_options: See
            `CollectorThread`.
        num_threads: Torch threads of this process; None leaves them alone.
        incarnation: How often its place in the tree was filled before.
        on_worker_failure, worker_timeout_s, keep_bad_batches, microbatch_size, train_batch_size, prefetch, norm_over: See
            `Scheme`.
        replay_workers_factory, replay_options: Makes its set of replay shards, None for no replay level; see `Shards`.

    Attributes:
        index_worker, col_communication, compress_grads_to_send: As given.
        iter: Number of gradients computed.
        col_workers: The CWorkerSet; `local_worker` and `remote_workers` are its members.
        actor, algo, storage: The agent's parts, those of the local collection worker.
        collector, inqueue: The CollectorThread, and its `queue.Queue` of items (`CollectorThread.queue`).
        encoder: Of gradients.
        replay_workers, shards: The RWorkerSet and what is on its way to and from it; None without a replay level.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of each gradient worker for the data of one gradient."""

        train_batch_size: int | None = option(
            None, low=1, help="Least number of steps of a train batch: whole rounds if collection is synchronous, whole rollouts if it "
            "is asynchronous; None: one. Steps in which an environment is reset count. With replay workers, transitions or sequences "
            "drawn for an update, None: the algorithm's mini_batch_size; for replay of whole rollouts, the least number of their steps "
            "(`VTraceBuffer`) or sequences (`RolloutSequenceBuffer`).")
        keep_bad_batches: str | os.PathLike[str] | None = option(
            None, help="Directory for the first batches of each gradient worker whose loss or gradient is not finite; None keeps none.")

        def __post_init__(self) -> None:
            """Refuse a directory that cannot be made; keep its absolute path."""
            super().__post_init__()
            if self.keep_bad_batches is not None:
                object.__setattr__(self, "keep_bad_batches", check_directory("keep_bad_batches", self.keep_bad_batches))

    def __init__(self, index_worker: int, col_workers_factory: Callable[..., Any],  # noqa: PLR0913, PLR0915 - the public signature
                 col_communication: Communication | str = "synchronous", compress_grads_to_send: Wanted = False,
                 col_execution: Execution | str = "Central", col_fraction_workers: float = 1.0,
                 initial_weights: Weights | None = None, device: str | None = None, *, runtime: Runtime | None = None,
                 collects: bool = True, fraction_samples: float = 0.25, col_in_flight: int = 2, queue_size: int = 16,
                 queue_timeout_s: float = 300.0, broadcast_interval: int = 1, num_threads: int | None = None,
                 keep_bad_batches: str | None = None, incarnation: int = 0, on_worker_failure: str = "restart",
                 worker_timeout_s: float = 60.0, microbatch_size: int | None = None, train_batch_size: int | None = None,
                 prefetch: int = 0, norm_over: str = "batch",
                 replay_workers_factory: Callable[..., RWorkerSet] | None = None,
                 replay_options: Mapping[str, Any] | None = None, **collector_options: Any) -> None:
        super().__init__(index_worker)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.col_communication = Communication(col_communication)
        self.compress_grads_to_send = compress_grads_to_send
        self.iter = 0
        self._runtime = runtime or ThreadRuntime()
        self.encoder: Encoder = Encoder(Compression.of(GRADS, compress_grads_to_send), self._runtime.now)
        self._point = self._runtime.points(f"GWorker {index_worker}", incarnation)
        self._incarnation = incarnation
        self._journal = self._runtime.journal(f"GWorker {index_worker}", incarnation)
        self.col_workers = col_workers_factory(
            index_parent=index_worker, local_device=device, runtime=self._runtime,
            col_execution=col_execution, col_communication=col_communication, initial_weights=initial_weights,
            collects=collects, first_incarnation=_INCARNATIONS * incarnation, journal=self._journal)
        self.local_worker: CWorker = self.col_workers.local_worker()
        self.remote_workers: list[Handle[CWorker]] = self.col_workers.remote_workers()
        self.actor, self.algo, self.storage = self.local_worker.actor, self.local_worker.algo, self.local_worker.storage
        self.ledger = Ledger()
        supervision = Supervisor.Options(on_worker_failure=on_worker_failure, worker_timeout_s=worker_timeout_s)
        self.replay_workers: RWorkerSet | None = None
        self.shards: Shards | None = None
        if replay_workers_factory is not None and collects:
            self.replay_workers = replay_workers_factory(
                index_parent=index_worker, runtime=self._runtime, first_incarnation=_INCARNATIONS * incarnation)
            self.shards = Shards(
                self.replay_workers, self.ledger, supervision=supervision, timeout_s=queue_timeout_s,
                seed=self.storage.generator.initial_seed(), version=lambda: self.actor_version, **(replay_options or {}))
        is_async = self.col_communication is ASYNC
        in_rounds, items_are_batches = not is_async and self.shards is None, is_async and self.shards is None
        self.storage.plan_batches(accumulator.num_rollouts(
            self.storage.rollout_size * self.local_worker.num_envs, train_batch_size,
            (max(1, len(self.remote_workers)), microbatch_size) if in_rounds else None))
        self.collector = CollectorThread(
            index_worker, self.local_worker, self.remote_workers, col_fraction_workers, col_communication,
            col_execution, broadcast_interval, runtime=self.col_workers.runtime, ledger=self.ledger,
            fraction_samples=fraction_samples, col_in_flight=col_in_flight, queue_size=queue_size,
            queue_timeout_s=queue_timeout_s, shards=self.shards, supervisor=Supervisor(
                self.remote_workers, self.col_workers.replace, self.col_workers.runtime, supervision, seed=index_worker), train_batch_size=train_batch_size if items_are_batches else None, **collector_options)
        self.inqueue = self.collector.queue
        self._batches: Iterator[Batch] | None = None
        self._batch: Batch | None = None
        self._item_open = False  # an item is in the storage whose batches have not been made yet
        self._item: Item | None = None  # the current one
        self._unused_steps = 0   # new steps of the current item that no gradient has used
        self._drawn_steps = 0    # steps of the current item that batches have drawn for the first time in this pass
        self._evicted = 0        # steps that replay has given up for newer ones
        self._collected_before = 0  # by the worker that it goes on from
        self._preparing, self._least_steps = 0, round(fraction_samples * self.storage.rollout_size)
        self.report = Report(self._runtime.now)
        self._bad_batches = BadBatches(keep_bad_batches, index_worker, self.algo)
        self._fault = ""  # of the last gradient, before any averaging
        self._grads: Vectors | None = None  # the last ones computed
        self._used = accumulator.Used(0, 0, True)
        self._microbatch_size = None if microbatch_size is None else check_count("microbatch_size", microbatch_size)
        self._train_batch_size = None if train_batch_size is None else check_count("train_batch_size", train_batch_size)
        self._prefetch, self._forgets = prefetch, False  # whether each microbatch is discarded after its gradient is computed
        if microbatch_size is not None:
            self.storage.device = torch.device("cpu")  # one slice at a time goes to the device
            self._forgets = train_batch_size is not None and not accumulator.why_all_is_kept(self.algo.options, norm_over)
            if index_worker == 0:
                accumulator.warn_of_batch_norm(self.actor)
        self._rank = Rank()
        self._final: LedgerSnapshot | None = None

    def ready(self) -> int:
        """Answer once this worker and its collection workers are built."""
        self.col_workers.wait_ready()
        if self.replay_workers is not None:
            self.replay_workers.wait_ready()
        return self.index_worker

    @property
    def parameters(self) -> Parameters:
        """Those in force, of algorithm and storage."""
        return dict(self.algo.parameters), dict(self.storage.parameters)

    @property
    def actor_version(self) -> int:
        """Number of times the actor has been updated."""
        return self.local_worker.version

    @timed("copy")
    def get_data(self) -> Batch:
        """Take the next batch; once the last item is used up, wait for the next of `collector.queue`, or for a draw from replay."""
        if self.shards is not None and self.storage.gives.is_kept:
            self._batch = self._draw(self.shards)
            return self._batch
        batch = None if self._batches is None else next(self._batches, None)
        while batch is None:  # a replay that learning has not started from gives none
            if not self._item_open:
                self._take_item()
            batch = next(self._open_batches(None), None)
        assert self._item is not None
        before, self._drawn_steps = self._drawn_steps, self._drawn_steps + batch.num_new_samples
        batch.num_new_samples = self._item.count_new(before, self._drawn_steps)
        self._batch = batch
        return batch

    def _draw(self, shards: Shards) -> Any:
        with self.report.watch.part("wait"):
            self.collector.ensure_started()
            batch = shards.get(lambda: self.collector.stopped, self.collector.why_no_data, self.storage.parameters)
        self.report.add_draw(shards, self.actor_version)
        return batch

    @timed("copy")
    def _take_item(self) -> None:
        item = self._item = self._collect() if self.shards is None else Item(
            [Part(rollout, 0, is_old=True) for rollout in self._draw(self.shards).messages()])
        self._unused_steps = self._drawn_steps = 0
        if item.uses == 1:
            for part in item.parts:
                if not part.is_old:
                    self.report.add_rollout(part.rollout, part.version_queued, self.actor_version)
            self._unused_steps = item.num_new_steps
            with self.report.watch.part("decode"):  # later uses find tensors
                item.parts = [part._replace(rollout=self.report.receive(part.rollout)) for part in item.parts]
        self.storage.insert_from(*zip(*((part.rollout.data, part.rollout.source) for part in item.parts), strict=True))
        self.storage.before_gradients()
        self._item_open = True
        if self.storage.gives.is_kept:
            self._book_as_resident()

    def _book_as_resident(self) -> None:
        """The item's steps have come into replay; those that it gave up for them, it counts itself."""
        evicted = self.storage.counters["evicted"]
        self.ledger.move(self._unused_steps, "queued", "resident")
        self._unused_steps = 0
        self.ledger.move(evicted - self._evicted, "resident", "evicted")
        self._evicted = evicted

    @timed("wait")
    def _collect(self) -> Item:
        """Wait for the next item: one of the queue, or, of larger synchronous train batches, a microbatch or all that is kept."""
        if self._train_batch_size is None or self.col_communication is ASYNC:
            return self.collector.get()
        microbatch = self._microbatch_size or self._train_batch_size
        return self.collector.get_rounds(microbatch, microbatch if self._forgets else self._train_batch_size)

    def _tell_replay(self, batch: Any, info: dict[str, Any]) -> None:
        """What a gradient said of single samples is for priorities, not for reports."""
        if self.shards is None:
            self.storage.after_gradients(batch, info)
        errors = info.pop("errors", None)
        if self.shards is not None and self.storage.has_priorities and errors is not None and not self._fault:
            self.shards.learned(batch.ids, self.storage.item_errors(batch, errors))

    @with_part
    def prepare(self, weights: Weights | None = None, *, skip_remaining: bool = False,
                parameters: Parameters | None = None, number: int = 0) -> tuple[Moments, WorkersPart | None]:
        """Take the next item if the last is used up; (count, mean, M2) of its advantages, and the journal's part.

        Synchronous gradient workers normalise over all their items together, as one worker would over the whole. Until it
        has answered, `preempt(number)` ends what it collects itself.
        """
        self._preparing = number
        self._begin_request(weights, parameters, skip_remaining)
        if not self._item_open:
            self._take_item()
        return self.storage.advantage_moments(), self.take_part()

    def _begin_request(self, weights: Weights | None, parameters: Parameters | None, skip_remaining: bool) -> None:
        """Take over what a request brings."""
        if weights is not None:
            self.set_weights(weights)
        if parameters is not None:
            self.algo.parameters, self.storage.parameters = parameters
        if skip_remaining:
            self.skip_remaining()

    @timed("copy")
    def _open_batches(self, advantage_moments: Sequence[Moments] | None) -> Iterator[Batch]:
        if self._forgets:  # then each microbatch is normalised by itself, if at all
            advantage_moments = None
        elif self._rank.is_member and self.algo.advantage_normalization == "batch":
            with self.report.watch.part("average"):
                advantage_moments = self._rank.gather_all(self.storage.advantage_moments())
        if advantage_moments is not None:
            self.storage.normalize_by(advantage_moments)
        self._batches = self.algo.batches(self.storage)
        self._item_open = False
        return self._batches

    def get_grads(self, distribute_gradients: bool = False) -> tuple[Vectors, dict[str, float]]:
        """Compute gradients of the batch that `get_data` took.

        Args:
            distribute_gradients: If True, gradients are averaged over all gradient workers here, for each to apply.

        Returns:
            One flat float32 gradient per optimised group, and the algorithm's statistics.

        Raises:
            CallOrderError: There is no batch, or its gradients were already computed.
        """
        if self._batch is None:
            raise CallOrderError("get_grads() uses the batch that get_data() took, once; call get_data() first, or step() for both")
        batch: Any = self._batch
        self._fault = ""
        if not (any(samples_by_policy(batch).values()) or batch.num_samples):
            nothing: Vectors = [None] * len(self.algo.gradient_sizes)  # but other ranks may have something to learn from
            grads = self._mean_of_ranks(nothing, 0, {}, batch.last) if distribute_gradients else []
            info: dict[str, Any] = {}
            self._used = accumulator.Used(0, 0, batch.last)
        elif self._forgets:
            grads, info = self._accumulate_microbatches(distribute_gradients)
        else:
            grads, info = self.compute_gradients(batch, distribute_gradients)
            self._used = accumulator.Used(batch.num_samples, batch.num_new_samples, batch.last, samples_by_policy(batch))
            self._unused_steps -= batch.num_new_samples
            self._tell_replay(batch, info)
        if self._fault:
            self._give_up_item()
        self.ledger.move(self._used.num_new_samples, "queued", "sent")
        if self._used.last:
            self._batches = None
        self._grads, self._batch = grads, None  # a second gradient of the same batch would count its steps again
        return grads, info

    def _accumulate_microbatches(self, distribute_gradients: bool) -> tuple[Vectors, dict[str, float]]:
        """The gradient of a whole train batch, of which no more than a microbatch is held at a time."""
        total = accumulator.GradAccumulator(self._microbatch_size, self.algo.loss_reduction)
        num_new, size, wanted = 0, 0, self._train_batch_size or 0
        while True:
            batch, item = self._batch, self._item
            assert batch is not None
            assert item is not None
            num_new, size = num_new + batch.num_new_samples, size + item.size
            accumulator.log_microbatch(total.num_parts + 1, size, wanted)
            is_enough = size >= wanted
            if self._prefetch and not is_enough:
                self.collector.ask_ahead(self._microbatch_size or wanted)
            grads, info = self.compute_gradients(batch, False)
            self._tell_replay(batch, info)
            total.add(grads, batch.num_samples, info, samples_by_policy(batch))
            self._unused_steps -= batch.num_new_samples
            self._batches = self._batch = self._item = batch = item = None  # nothing refers to it when the next one is collected
            self.storage.reset()
            if is_enough:
                break
            self.get_data()
        self._used = accumulator.Used(total.num_samples, num_new, True, total.samples)
        grads = total.result()
        if distribute_gradients:
            self._unused_steps += num_new  # until all ranks have used theirs
            grads = self._mean_of_ranks(grads, total.num_samples, total.samples, True)
            self._unused_steps -= num_new
        return grads, accumulator.decided(self.algo, total.info())

    def step(self, distribute_gradients: bool = False) -> tuple[Vectors, dict[str, float]]:
        """Take the next batch and compute its gradients; see `get_grads`."""
        self.get_data()
        return self.get_grads(distribute_gradients)

    @timed("grad")
    def compute_gradients(self, batch: Batch, distribute_gradients: bool) -> tuple[Vectors, dict[str, float]]:
        """Gradients of one batch.

        Args:
            batch: What the algorithm's loss needs.
            distribute_gradients: If True, average them over all gradient workers, weighted by their samples.

        Returns:
            One flat float32 gradient per optimised group, and the algorithm's statistics.
        """
        grads, info = accumulator.differentiate(self.algo, batch, self._microbatch_size, self.report.counters, self._forgets)
        if self._point is not None and self._point("grad"):
            grads = not_finite(grads)
        fault = self._bad_batches.find_fault(batch, grads, info, self.actor_version)
        self._fault = self._fault or fault
        if distribute_gradients:
            grads = self._mean_of_ranks(grads, batch.num_samples, samples_by_policy(batch), batch.last)
        self.iter, self._grads = self.iter + 1, grads
        return grads, info

    @timed("average")
    def _mean_of_ranks(self, grads: Vectors, num_samples: int, samples: Mapping[str, int], last: bool) -> Vectors:
        return self._rank.mean(grads, list(samples.values()) or [num_samples] * len(grads), self.algo.gradient_sizes,
                               tells=last and self._rank.has_to_tell(self.report.moments))

    def apply_gradients(self, gradients: Vectors | None = None, *,
                        moments: tuple[dict[str, Moments], ...] = ()) -> dict[str, float] | None:
        """Make one update of the actor, and merge `moments` into its normalisers.

        Args:
            gradients: One gradient per optimised group; None applies the gradients that were computed last.
            moments: Of rollouts, for the normalisers.

        Returns:
            The algorithm's statistics; None if the gradient is not finite, so that no update was made: parameters,
            optimiser and version are as before. Whoever asked counts that.

        Raises:
            CallOrderError: `gradients` is None, and this worker has computed none, or its last batch had no sample.
        """
        if gradients is None and not (gradients := self._grads):
            raise CallOrderError("apply_gradients() applies the gradients that this worker computed last, but there are none; call step(), "
                                 "get_grads() or compute_gradients() first, or give gradients")
        accumulator.log_update(self._microbatch_size, self._used.num_samples)
        if self._point is not None and self._point("update"):
            gradients = not_finite(gradients)
        info: dict[str, float] | None = None
        with self._journal.writing():
            try:
                info = self.algo.apply_gradients(gradients)
            except NonFiniteUpdateError:
                logger.debug("GWorker %d makes no update of version %d", self.index_worker, self.actor_version, exc_info=True)
            else:
                self.local_worker.version += 1
            if moments:  # what data say about themselves is finite, whatever became of the gradient
                self.local_worker.merge_moments(moments)
        return info

    def take_part(self) -> WorkersPart | None:
        """(name, incarnation, part) of what its journal noted since the last part was taken; None if it keeps none."""
        part = self._journal.take()
        return None if part is None else (f"GWorker {self.index_worker}", self._incarnation, part)

    @with_part
    def collect_and_grad(self, weights: Weights | None = None, *, advantage_moments: Sequence[Moments] | None = None,
                         skip_remaining: bool = False, distribute_gradients: bool = False,
                         parameters: Parameters | None = None, check: bool = False) -> Gradients:
        """One request of the update worker: take weights, then data, then compute and pack a gradient.

        Args:
            weights: New weights, or None to go on with those it has.
            advantage_moments: Of the items of all gradient workers, if they normalise together.
            skip_remaining: Give up what is left of the current item first.
            distribute_gradients: Average and apply among the gradient workers; nothing but statistics comes back.
            parameters: Those in force, where no weights bring them.
            check: Tell a checksum of what was applied to.
        """
        self._begin_request(weights, parameters, skip_remaining)
        if self._item_open and advantage_moments is not None:
            self._open_batches(advantage_moments)
        version = self.actor_version
        try:
            self.get_data()
            grads, info = self.get_grads(distribute_gradients)
        except HeldError:  # nobody waits for data any more
            grads, info, self._used = [], {}, accumulator.Used(0, 0, False)
        report, used = self.report, self._used
        vectors: Any = grads
        skipped = False
        if distribute_gradients:
            vectors, applied = self._apply_mean(grads)
            skipped, info = applied is None, {**info, **(applied or {})}
        elif self.index_worker > 0:
            with report.watch.part("encode"):
                vectors = report.pack(grads, self.encoder)
        reported = report.fields(self.collector, self.shards)
        self.report = Report(self._runtime.now, report)
        return Gradients(
            vectors=vectors, num_samples=used.num_samples, num_new_samples=used.num_new_samples,
            weights_version=version, worker=self.index_worker, incarnation=self._incarnation, sequence=self.iter, info=info,
            ledger=self.ledger.snapshot(), last=used.last, samples=dict(used.samples), fault=self._fault, skipped=skipped,
            part=self.take_part() if self.index_worker > 0 else None,
            checksum=self.get_weights(learning=True).checksum if check else None, **reported)

    def _apply_mean(self, grads: Vectors) -> tuple[Vectors | None, dict[str, float] | None]:
        """Make the update that all ranks make: (what is sent, the algorithm's statistics, None if it is left out)."""
        report = self.report
        self._rank.hold(report.moments)
        report.moments = []  # they are told once, also if the exchange breaks off and the report goes on
        if all(grad is None for grad in grads):  # no rank had anything to learn from
            return [], {}
        with report.watch.part("average"):
            moments = self._rank.told(self._used.last)
        with report.watch.part("apply"):
            return None, self.apply_gradients(grads, moments=moments)

    def skip_remaining(self) -> None:
        """Give up what is left of the current item; steps that no gradient has used are dropped."""
        self._give_up_item()
        if self._batches is not None:
            self._batches = None
            self._drop_unused(DropReason.EARLY_STOP)
        if self._rank.is_member:
            self.local_worker.merge_moments(self._rank.tell_all())

    def _drop_unused(self, reason: DropReason) -> None:
        """Steps of the current item that no gradient has used, or none that was averaged, are given up."""
        self.ledger.drop(self._unused_steps, "queued", reason)
        self._unused_steps = 0

    def _give_up_item(self) -> None:
        """Use the current item in no later pass."""
        if self._item is not None:
            self.collector.feed.discard(self._item)

    @timed("decode")
    def set_weights(self, actor_weights: Weights | Mapping[str, Any]) -> None:
        """Update the actor with the given weights: a `Weights` message, or an acting state by name."""
        self.local_worker.set_weights(actor_weights)

    def join_group(self, meeting: Meeting, place: int, state: WholeState | None = None) -> None:
        """Become rank `place` of the group that averages gradients, with the state that all go on from, unless it has that.

        Raises:
            RankLostError: Not all came.
        """
        if state is not None:
            self.local_worker.load_whole_state(state)
        self._rank.join(self._runtime, meeting, place)

    def leave_group(self, generation: int) -> None:
        """Signal: the group of this generation is no more; who waits for its ranks need not."""
        self._rank.leave(generation)

    def give_up(self, generation: int) -> Candidate:
        """Leave the group of this generation, and whatever was begun to be learned from; ready for the next."""
        self._rank.leave(generation)
        if not self._item_open:  # else nobody has used any of it
            self._give_up_item()
            self._batches = self._batch = None
            self._drop_unused(DropReason.WORKER_LOST)
        return Candidate(self.actor_version, self._incarnation, self.ledger.snapshot(), *propose_address())

    def whole_state(self) -> WholeState:
        """All that making the next update needs, but for data."""
        return self.local_worker.whole_state()

    def follow_schedules(self, env_steps: Callable[[], int], target_steps: int) -> None:
        """Set what is scheduled, of algorithm and storage, to its value after so many steps of the whole experiment."""
        for part in (self.algo, self.storage):
            if part.schedules:
                with self._journal.writing():  # the user may be ending a schedule now
                    part.follow_schedules(env_steps(), target_steps)

    def get_weights(self, learning: bool = False) -> Weights:
        """A snapshot of the acting state and its version; for gradient workers, with the learning state."""
        with self._journal.lock:
            weights = self.local_worker.get_weights()
            return replace(weights, learning=self.local_worker.learning_state()) if learning else weights

    def save_model(self, fname: str) -> str:
        """Save the current actor as a torch-loadable file of plain types, whose folder must exist; returns the path."""
        with self._journal.lock:
            state = {"format": 1, "version": self.actor_version, "acting_state": self.algo.acting_state()}
        torch.save(state, fname)
        return fname

    def update_algorithm_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Change one of the algorithm's updatable parameters; an unknown name raises `KeyError`."""
        self.local_worker.update_algorithm_parameter(parameter_name, new_parameter_value)

    def hold(self, number: int) -> None:
        """Signal: drain number so and so, from 1, is to come; a request that waits for data ends without any."""
        self.collector.hold(number)

    def drain(self, number: int, timeout_s: float) -> tuple[int, LedgerSnapshot]:
        """Bring to an end what is underway below; what was not learned from is given up. The next request goes on.

        Args:
            number: 1, 2, ...: of this drain.
            timeout_s: Workers that are not done by then are lost.

        Returns:
            Its incarnation and its account, in which nothing is in flight or queued.
        """
        self.collector.drain(number, timeout_s)
        if not self.storage.gives.is_kept:  # what replay has given is a copy, and may wait
            self._batches = self._batch = self._item = None
            self._item_open, self._unused_steps = False, 0
            self._rank.forget()
        self.ledger.drop_all(DropReason.SHUTDOWN)
        return self._incarnation, self.ledger.snapshot()

    def state(self) -> dict[str, Any]:
        """What is to be saved of it, once it is drained; see `saved`."""
        return saved.state_of(self)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from the `state()` of another; nothing has been collected yet."""
        saved.restore(self, state)
        self._evicted, self._collected_before = self.storage.counters.get("evicted", 0), self.ledger.snapshot().collected

    def begin_anew(self, seed: int) -> None:
        """Let collection and draws go on as in a tree that was just built with this seed."""
        self._batches, self._batch, self._item, self._item_open = None, None, None, False  # of replay some may be left
        self.local_worker.begin_anew(seed)
        saved.let_begin_anew(self.remote_workers, self.col_workers.runtime, seed)

    def preempt(self, number: int) -> None:
        """Signal: end the rollout that is being collected for `prepare` number so and so, after its least share of steps."""
        if number == self._preparing:
            self.local_worker.preempt_running(self._least_steps)

    def interrupt(self) -> None:
        """Signal: no data comes any more; a call that waits for data, or for other ranks, ends with an error."""
        self.collector.interrupt()
        self._rank.leave()

    def stop(self) -> LedgerSnapshot:
        """Stop collecting and end the workers below. Idempotent.

        Returns:
            The final account; `collected` is what the collection workers themselves counted.
        """
        if self._final is None:
            self.collector.close(_STOP_TIMEOUT_S)
            made, undelivered = self.col_workers.close(_STOP_TIMEOUT_S)
            if self.shards is not None:
                self.shards.close(_STOP_TIMEOUT_S)
            self.ledger.collect(undelivered)
            self.ledger.drop_all(DropReason.SHUTDOWN)
            before = self._collected_before + self.collector.delivered_by_lost
            self._rank.leave()
            # The collectors' own count, so that the equation can fail.
            self._final = self.ledger.snapshot(None if made is None else before + made)
        return self._final
