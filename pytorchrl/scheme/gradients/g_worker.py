"""The gradient worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias, cast

import torch

from pytorchrl.agent.data import Batch
from pytorchrl.errors import CallOrderError
from pytorchrl.runtime import Runtime, ThreadRuntime, WorkersPart
from pytorchrl.scheme.base.worker import Communication, Execution, Worker
from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
from pytorchrl.scheme.collection.collector_thread import CollectorThread, DrainingError
from pytorchrl.scheme.collection.strategies import Barrier, OnArrival
from pytorchrl.scheme.gradients import microbatch as micro
from pytorchrl.scheme.gradients.assembly import assemble
from pytorchrl.scheme.gradients.error_parts import errors_carry_part
from pytorchrl.scheme.gradients.g_worker_options import GWorkerOptions
from pytorchrl.scheme.gradients.gradient_computer import not_finite
from pytorchrl.scheme.gradients.kinds import default_collection
from pytorchrl.scheme.gradients.process_group import Candidate, Meeting, Vectors, propose_address
from pytorchrl.scheme.gradients.worker_stats import timed
from pytorchrl.scheme.ledger import DropReason, LedgerSnapshot
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.encoder import GRADS, WEIGHTS, Compression, Encoder, Wanted
from pytorchrl.scheme.transport.messages import Gradients, Moments, Parameters, Weights, WholeState

# The collection workers of a replaced GWorker count their incarnations from a multiple of this, so that no number is
# used twice.
_INCARNATIONS = 64
# Seconds that stop() gives workers to end their running call; the whole of stop() promises 10 s.
_STOP_TIMEOUT_S = 5.0

__all__ = ["CollectorThread", "GWorker"]


class GWorker(Worker):
    """Computes gradients from the data of its collection workers.

    Args:
        index_worker: 0 is local to the update worker, 1..N are remote.
        col_workers_factory: Makes its set of collection workers.
        col_communication: "synchronous" or "asynchronous" collection.
        compress_grads_to_send: Codec of gradients; see `GWorkerSet.Options`.
        col_execution: "Central" or "Parallel" collection.
        col_fraction_workers: Share of the collection workers that ends a synchronous round.
        initial_weights: Weights to start from.
        device: "cpu" or "cuda:N" for its computation; None is the CPU.
        collection: Options of collection: a `SynchronousCollection`, `AsynchronousCollection` or `ReplayCollection`.
            None: the arguments above, and defaults.
        supervision: Options for lost workers; None: defaults.
        runtime: Where its remote collection workers run.
        collects: False for the worker that only serves parameters and applies gradients.
        num_threads: PyTorch threads of this process; None does not change them.
        incarnation: Number of workers that were in its place before.
        compress_weights_to_send: Codec of weights that are sent to collection workers.
        replay_workers_factory: Makes its set of replay shards; None: no replay level.

    Attributes:
        index_worker, col_communication, compress_grads_to_send: As given.
        iter: Number of gradients computed.
        col_workers: The CWorkerSet; `local_worker` and `remote_workers` are its members.
        actor, algo, storage: The agent's parts, those of the local collection worker.
        collector, inqueue: The CollectorThread, and the `queue.Queue` of train batches (`CollectorThread.queue`).
        encoder: Encoder of gradients.
        ledger: Where each env step of its collection workers is.
        replay_workers, shards: The RWorkerSet and the connection to it; None without a replay level.
        stats: Statistics for its next message.
    """

    Options: TypeAlias = GWorkerOptions

    def __init__(self, index_worker: int, col_workers_factory: Callable[..., CWorkerSet],  # noqa: PLR0913 - public signature
                 col_communication: Communication | str = "synchronous", compress_grads_to_send: Wanted = False,
                 col_execution: Execution | str = "Central",
                 col_fraction_workers: float = Barrier.Options.col_fraction_workers,
                 initial_weights: Weights | None = None, device: str | None = None, *,
                 collection: CollectorThread.Options | None = None,
                 supervision: Supervisor.Options | None = None, runtime: Runtime | None = None, collects: bool = True,
                 num_threads: int | None = None, incarnation: int = 0, compress_weights_to_send: Wanted = False,
                 replay_workers_factory: Callable[..., RWorkerSet] | None = None) -> None:
        super().__init__(index_worker)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if collection is None:
            collection = default_collection(Communication(col_communication), col_fraction_workers,
                                            has_shards=replay_workers_factory is not None)
        is_async = isinstance(collection, OnArrival.Options)
        self.col_communication = Communication.ASYNC if is_async else Communication.SYNC
        self.compress_grads_to_send, self._incarnation = compress_grads_to_send, incarnation
        self._runtime = runtime or ThreadRuntime()
        self.encoder: Encoder = Encoder(Compression.of(GRADS, compress_grads_to_send), self._runtime.now)
        self._point = self._runtime.points(f"GWorker {index_worker}", incarnation)
        self._journal = self._runtime.journal(f"GWorker {index_worker}", incarnation)
        self.col_workers = col_workers_factory(
            index_parent=index_worker, local_device=device, runtime=self._runtime,
            col_execution=col_execution, col_communication=self.col_communication, initial_weights=initial_weights,
            collects=collects, first_incarnation=_INCARNATIONS * incarnation, journal=self._journal)
        self.local_worker, self.remote_workers = self.col_workers.local_worker(), self.col_workers.remote_workers()
        self.actor, self.algo, self.storage = self.local_worker.actor, self.local_worker.algo, self.local_worker.storage
        self.replay_workers: RWorkerSet | None = None
        if replay_workers_factory is not None and collects:
            self.replay_workers = replay_workers_factory(
                index_parent=index_worker, runtime=self._runtime, first_incarnation=_INCARNATIONS * incarnation)
        parts = assemble(
            index_worker, self.col_workers, self.replay_workers, collection, supervision or Supervisor.Options(),
            self._runtime, compress_weights_to_send=compress_weights_to_send, point=self._point)
        self.ledger, self.stats, self._group, self._plan = parts.ledger, parts.stats, parts.group, parts.plan
        self.shards, self.collector, self.inqueue = parts.shards, parts.collector, parts.collector.queue
        self.batch_source, self._gradients = parts.source, parts.gradients
        self._collected_before = 0  # env steps in the restored ledger
        self._preparing = 0  # number of the running prepare()
        self._final: LedgerSnapshot | None = None

    def ready(self) -> int:
        """Return the worker's index, once it and its collection workers are built."""
        self.col_workers.wait_ready()
        if self.replay_workers is not None:
            self.replay_workers.wait_ready()
        return self.index_worker

    @property
    def parameters(self) -> Parameters:
        """Values of the parameters of algorithm and storage that are in force."""
        return dict(self.algo.parameters), dict(self.storage.parameters)

    @property
    def iter(self) -> int:
        """Number of gradients computed."""
        return self._gradients.num_computed

    @property
    def batch(self) -> Batch | None:
        """The batch that `get_data` took and no gradient has used; None if there is none."""
        return self._gradients.batch

    @property
    def actor_version(self) -> int:
        """Number of times the actor has been updated."""
        return self.local_worker.version

    # Gradients

    def get_data(self) -> Batch:
        """Take the next batch; after the last one of a train batch, wait for the next train batch."""
        batch = self._gradients.batch = self.batch_source.next()
        return batch

    def get_grads(self, distribute_gradients: bool = False) -> tuple[Vectors, dict[str, float]]:
        """Compute gradients of the batch that `get_data` took.

        Args:
            distribute_gradients: If True, average the gradients over all gradient workers, for each to apply.

        Returns:
            One flat float32 gradient per optimized group, and the algorithm's statistics.

        Raises:
            CallOrderError: There is no batch, or its gradients were already computed.
        """
        if self._gradients.batch is None:
            raise CallOrderError("get_grads() uses the batch that get_data() took, once; call get_data() first, or "
                                 "step() for both")
        return self._gradients.differentiate_taken(distribute_gradients, self.get_data, self.compute_gradients)

    def step(self, distribute_gradients: bool = False) -> tuple[Vectors, dict[str, float]]:
        """Take the next batch and compute its gradients; see `get_grads`."""
        self.get_data()
        return self.get_grads(distribute_gradients)

    def compute_gradients(self, batch: Batch, distribute_gradients: bool) -> tuple[Vectors, dict[str, float]]:
        """Compute the gradients of one batch.

        Args:
            batch: A batch as the algorithm's loss needs it.
            distribute_gradients: If True, average the gradients over all gradient workers, weighted by their samples.

        Returns:
            One flat float32 gradient per optimized group, and the algorithm's statistics.
        """
        return self._gradients.compute(batch, distribute_gradients)

    def apply_gradients(self, gradients: Vectors | None = None, *,
                        moments: tuple[dict[str, Moments], ...] = ()) -> dict[str, float] | None:
        """Update the actor once, and merge moments into its normalizers.

        Args:
            gradients: One gradient per optimized group; None applies the gradients that were computed last.
            moments: Moments of rollouts, for the normalizers.

        Returns:
            The algorithm's statistics; None if the gradient is not finite, so that there was no update: parameters,
            optimizer and version are as before. The caller counts it.

        Raises:
            CallOrderError: `gradients` is None, and this worker has computed none, or its last batch had no sample.
        """
        if gradients is None and not (gradients := self._gradients.grads):
            raise CallOrderError("apply_gradients() applies the gradients that this worker computed last, but there "
                                 "are none; call step(), get_grads() or compute_gradients() first, or give gradients")
        micro.log_update(self._plan.microbatch_size, self._gradients.used.num_samples)
        if self._point is not None and self._point("update"):
            gradients = not_finite(gradients)
        return self.local_worker.apply_gradients(gradients, moments)

    # Requests of the update worker

    def take_part(self) -> WorkersPart | None:
        """Return (name, incarnation, part) of the journal's notes since the last call; None if it keeps none."""
        part = self._journal.take()
        return None if part is None else (f"GWorker {self.index_worker}", self._incarnation, part)

    @errors_carry_part
    def prepare(self, weights: Weights | None = None, *, skip_remaining: bool = False,
                parameters: Parameters | None = None, number: int = 0) -> tuple[Moments, WorkersPart | None]:
        """Take the next train batch if the last one is used up.

        Synchronous gradient workers normalize over the train batches of all of them, as one worker would over the
        whole. Until this call returns, `preempt(number)` ends the rollout that the worker collects itself.

        Returns:
            (count, mean, M2) of its advantages, and the journal's part.
        """
        self._preparing = number
        self._begin_request(weights, parameters, skip_remaining)
        if not self.batch_source.is_loaded:
            self.batch_source.load()
        return self.storage.advantage_moments(), self.take_part()

    def _begin_request(self, weights: Weights | None, parameters: Parameters | None, skip_remaining: bool) -> None:
        if weights is not None:
            self.set_weights(weights)
        if parameters is not None:
            self.algo.parameters, self.storage.parameters = parameters
        if skip_remaining:
            self.skip_remaining()

    @errors_carry_part
    def collect_and_grad(self, weights: Weights | None = None, *, advantage_moments: Sequence[Moments] | None = None,
                         skip_remaining: bool = False, distribute_gradients: bool = False,
                         parameters: Parameters | None = None, check: bool = False) -> Gradients:
        """Answer one request of the update worker: take weights, then data, then compute and pack a gradient.

        Args:
            weights: New weights; None: the worker keeps those that it has.
            advantage_moments: Moments of the train batches of all gradient workers, if they normalize together.
            skip_remaining: Discard the rest of the current train batch first.
            distribute_gradients: Average among the gradient workers and apply the mean; only statistics are returned.
            parameters: Parameters in force, if no weights bring them.
            check: Return a checksum of the parameters after the update.
        """
        self._begin_request(weights, parameters, skip_remaining)
        if self.batch_source.is_loaded and advantage_moments is not None:
            self.batch_source.start_pass(advantage_moments)
        version = self.actor_version
        try:
            self.get_data()
            grads, info = self.get_grads(distribute_gradients)
        except DrainingError:  # there will be no data for this request
            grads, info, self._gradients.used = [], {}, micro.Used(0, 0, False)
        used, skipped, vectors = self._gradients.used, False, cast("Any", grads)
        if distribute_gradients:
            vectors, applied = self._apply_mean(grads)
            skipped, info = applied is None, {**info, **(applied or {})}
        elif self.index_worker > 0:
            with self.stats.watch.part("encode"):
                vectors = self.stats.pack(grads, self.encoder)
        self.stats.traffic[WEIGHTS] += self.local_worker.take_weights_traffic()
        reported = self.stats.take((self.collector, self.batch_source), self.collector.take_send_s(),
                                   self.collector.weights_traffic)
        return Gradients(
            vectors=vectors, num_samples=used.num_samples, num_new_samples=used.num_new_samples,
            weights_version=version, worker=self.index_worker, incarnation=self._incarnation, sequence=self.iter,
            info=info, ledger=self.ledger.snapshot(), last=used.last, samples=dict(used.samples),
            fault=self._gradients.fault, skipped=skipped,
            shards=() if self.shards is None else tuple(state.statistics() for state in self.shards.states),
            queue_levels=self.batch_source.take_levels(), part=self.take_part() if self.index_worker > 0 else None,
            checksum=self.get_weights(learning=True).checksum if check else None, **reported)

    def _apply_mean(self, grads: Vectors) -> tuple[Vectors | None, dict[str, float] | None]:
        """Make the update that all ranks make.

        Returns:
            The vectors of the message (None: they were applied), and the algorithm's statistics (None: the update was
            left out).
        """
        moments, self.stats.moments = self.stats.moments, []  # they are shared once, even if the exchange fails
        self._group.store(moments)
        if all(grad is None for grad in grads):  # no rank had data to learn from
            return [], {}
        with self.stats.watch.part("average"):
            shared = self._group.shared(self._gradients.used.last)
        with self.stats.watch.part("apply"):
            return None, self.apply_gradients(grads, moments=shared)

    def skip_remaining(self) -> None:
        """Discard the rest of the current train batch; steps that no gradient has used are dropped."""
        self.batch_source.skip_remaining(DropReason.EARLY_STOP)
        if self._group.is_member:
            self.local_worker.merge_moments(self._group.share())

    def preempt(self, number: int) -> None:
        """Signal: end the rollout that `prepare` number `number` is collecting, after its least share of steps."""
        if number == self._preparing:
            self.local_worker.preempt_running(self._plan.least_steps)

    # The group of ranks

    def join_group(self, meeting: Meeting, place: int, state: WholeState | None = None) -> None:
        """Become rank `place` of the group that averages gradients.

        Args:
            meeting: Where the ranks connect.
            place: Rank of this worker.
            state: State from which all ranks go on; None: this worker has it.

        Raises:
            RankLostError: Not all ranks came.
        """
        if state is not None:
            self.local_worker.load_whole_state(state)
        self._group.join(self._runtime, meeting, place)

    def leave_group(self, generation: int) -> None:
        """Signal: the group of this generation has ended; a running exchange fails."""
        self._group.leave(generation)

    def give_up(self, generation: int) -> Candidate:
        """Leave the group of this generation and discard the current train batch; return a candidate for the next."""
        self._group.leave(generation)
        if not self.batch_source.is_loaded:  # a train batch of which nothing was used is kept
            self.batch_source.abandon(DropReason.WORKER_LOST)
            self._gradients.batch = None
        return Candidate(self.actor_version, self._incarnation, self.ledger.snapshot(), *propose_address())

    # Weights

    @timed("decode")
    def set_weights(self, actor_weights: Weights | Mapping[str, Any]) -> None:
        """Set the actor's weights: a `Weights` message, or an acting state by name."""
        self.local_worker.set_weights(actor_weights)

    def get_weights(self, learning: bool = False) -> Weights:
        """Return a snapshot of the acting state and its version; with `learning` also of the learning state."""
        with self._journal.lock:
            weights = self.local_worker.get_weights()
            return replace(weights, learning=self.local_worker.learning_state()) if learning else weights

    def whole_state(self) -> WholeState:
        """Return everything that the next update depends on, except data."""
        return self.local_worker.whole_state()

    def save_model(self, fname: str) -> str:
        """Save the actor as a file of plain types for `torch.load`, in an existing folder; return the path."""
        with self._journal.lock:
            state = {"format": 1, "version": self.actor_version, "acting_state": self.algo.acting_state()}
        torch.save(state, fname)
        return fname

    def update_algorithm_parameter(self, parameter_name: str, new_parameter_value: float) -> None:
        """Change one of the algorithm's updatable parameters; an unknown name raises `KeyError`."""
        self.local_worker.update_algorithm_parameter(parameter_name, new_parameter_value)

    def follow_schedules(self, env_steps: Callable[[], int], target_steps: int) -> None:
        """Set scheduled parameters of algorithm and storage to their values after so many env steps."""
        self.local_worker.follow_schedules(env_steps, target_steps)

    # Checkpoints and the end

    def announce_drain(self, number: int) -> None:
        """Signal: drain `number` (1, 2, ...) follows; a request that waits for data ends without any."""
        self.collector.announce_drain(number)

    @property
    def is_draining(self) -> bool:
        """Whether a drain was announced and is not complete."""
        return self.collector.is_draining

    def drain(self, number: int, timeout_s: float) -> tuple[int, LedgerSnapshot]:
        """Wait for everything in flight below this worker, and drop data that no gradient has used.

        Args:
            number: 1, 2, ..., the number of this drain.
            timeout_s: Seconds after which workers without an answer are lost.

        Returns:
            The worker's incarnation and its ledger, in which nothing is in flight or queued.
        """
        self.collector.drain(number, timeout_s)
        if not self.storage.gives.is_kept:  # batches of replay are copies, and may stay
            self.batch_source.clear()
            self._gradients.batch = None
            self._group.discard()
        self.ledger.drop_all(DropReason.SHUTDOWN)
        return self._incarnation, self.ledger.snapshot()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of a drained worker: data in replay, its ledger, remainders of its codec.

        The update worker saves parameters and optimizers. Draws and episodes start anew after a checkpoint.
        """
        shards = None if self.shards is None else self.shards.state()  # books shards that do not answer as lost
        return {"ledger": asdict(self.ledger.snapshot()), "storage": self.storage.state_dict(), "shards": shards,
                "remainders": {place: torch.from_numpy(array.copy()) for place, array in self.encoder.kept.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state()` of another worker, before anything was collected."""
        self.ledger.restore(LedgerSnapshot(**state["ledger"]))
        self.encoder.kept = {place: array.numpy() for place, array in state["remainders"].items()}
        self.storage.load_state_dict(state["storage"])
        if self.shards is not None:
            self.shards.restore(state["shards"])
        self.batch_source.restored()
        self._collected_before = self.ledger.snapshot().collected

    def reseed(self, seed: int) -> None:
        """Continue collection and draws like a worker tree that was just built with this seed."""
        self.batch_source.clear()
        self._gradients.batch = None
        self.local_worker.reseed(seed)
        self.col_workers.reseed_remote(seed)

    def interrupt(self) -> None:
        """Signal the end: no data comes any more, and a call that waits for data or for other ranks raises an error."""
        self.collector.interrupt()
        self._group.leave()

    def stop(self) -> LedgerSnapshot:
        """Stop collecting and end the workers below; may be called again.

        Returns:
            The final ledger; its `collected` is the collection workers' own count.
        """
        if self._final is None:
            self.collector.close(_STOP_TIMEOUT_S)
            made, undelivered = self.col_workers.close(_STOP_TIMEOUT_S)
            if self.shards is not None:
                self.shards.close(_STOP_TIMEOUT_S)
            self.ledger.collect(undelivered)
            self.ledger.drop_all(DropReason.SHUTDOWN)
            before = self._collected_before + self.collector.delivered_by_lost
            self._group.leave()
            # The collectors' own count, so that the ledger's equation is a real check.
            self._final = self.ledger.snapshot(None if made is None else before + made)
        return self._final
