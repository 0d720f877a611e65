"""The gradient worker."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pytorchrl.agent.data import Batch
from pytorchrl.agent.storages.returns import mean_and_std
from pytorchrl.errors import NonFiniteUpdateError
from pytorchrl.runtime import Handle, Runtime, ThreadRuntime, WorkersPart
from pytorchrl.scheme import codecs
from pytorchrl.scheme.base.worker import ASYNC, Communication, Execution, Worker, check_count, check_device
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.gradients.accumulator import GradAccumulator, why_all_is_kept
from pytorchrl.scheme.gradients.all_reduce import GradientGroup, propose_address
from pytorchrl.scheme.gradients.bad_batches import BadBatches
from pytorchrl.scheme.gradients.collector_thread import CollectorThread
from pytorchrl.scheme.gradients.report import Report, decode, merge_parts, own
from pytorchrl.scheme.ledger import DropReason, Ledger, LedgerSnapshot
from pytorchrl.scheme.messages import Gradients, Moments, Rollout, Weights
from pytorchrl.scheme.supervisor import Supervisor

# A replaced GWorker's collection workers count their incarnations from a multiple of this, so that none is used twice.
_INCARNATIONS = 64
# stop() gives workers this long to end their running call; the whole of stop() promises 10 s.
_STOP_TIMEOUT_S = 5.0


class _Used(NamedTuple):
    """What is behind the last gradient."""

    num_samples: int
    num_new_samples: int
    last: bool


P = ParamSpec("P")
R = TypeVar("R")

__all__ = ["CollectorThread", "GWorker"]

logger = logging.getLogger(__name__)


def _with_part(method: Callable[Concatenate[GWorker, P], R]) -> Callable[Concatenate[GWorker, P], R]:
    """Let an error take along what its worker's journal has noted, for no gradient will."""
    @functools.wraps(method)
    def call(self: GWorker, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if self.index_worker > 0:  # the local one is asked by its owner
                error.part = self.take_part()  # type: ignore[attr-defined]
            raise

    return call


class GWorker(Worker):
    """Computes gradients from the data that its collection workers bring.

    Args:
        index_worker: 0 is local to the update worker, 1..N are remote.
        col_workers_factory: Makes its set of collection workers.
        col_communication: "synchronous" or "asynchronous" collection.
        compress_grads_to_send: Whether gradients cross compressed, without loss.
        col_execution: "Central" or "Parallel" collection.
        col_fraction_workers: Share of collection workers that ends a synchronous round.
        initial_weights: Weights to start from.
        device: "cpu" or "cuda:N" for its computation; None is the CPU.
        runtime: Where its remote collection workers run.
        collects: False for the one that only serves parameters and applies gradients.
        fraction_samples, col_in_flight, queue_size, queue_timeout_s, broadcast_interval: See `CollectorThread`.
        num_threads: Torch threads of this process; None leaves them alone.
        keep_bad_batches: Directory for batches whose loss or gradient is not finite; None keeps none.
        incarnation: How often its place in the tree was filled before.
        on_worker_failure, worker_timeout_s: See `Supervisor`.
        microbatch_size: Most env steps of a backward pass; None: a batch is differentiated at once.
        train_batch_size: Env steps that an update waits for, where collection is synchronous; None: those of one round.
        prefetch: Microbatches that remote workers collect while one is differentiated, 0 or 1.
        norm_over: "batch" or "microbatch": what an algorithm normalises over where batches are collected by pieces.

    Attributes:
        index_worker, col_communication, compress_grads_to_send: As given.
        iter: Number of gradients computed.
        col_workers: The CWorkerSet; `local_worker` and `remote_workers` are its members.
        actor, algo, storage: The agent's parts, those of the local collection worker.
        inqueue: Queue of incoming data, that of `collector`.
        collector: The CollectorThread.
    """

    def __init__(self, index_worker: int, col_workers_factory: Callable[..., Any],  # noqa: PLR0913 - the public signature
                 col_communication: Communication | str = "synchronous", compress_grads_to_send: bool = False,
                 col_execution: Execution | str = "Central", col_fraction_workers: float = 1.0,
                 initial_weights: Weights | None = None, device: str | None = None, *, runtime: Runtime | None = None,
                 collects: bool = True, fraction_samples: float = 0.25, col_in_flight: int = 2, queue_size: int = 16,
                 queue_timeout_s: float = 300.0, broadcast_interval: int = 1, num_threads: int | None = None,
                 keep_bad_batches: str | None = None, incarnation: int = 0, on_worker_failure: str = "restart",
                 worker_timeout_s: float = 60.0, microbatch_size: int | None = None, train_batch_size: int | None = None,
                 prefetch: int = 0, norm_over: str = "batch") -> None:
        super().__init__(index_worker)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.col_communication = Communication(col_communication)
        self.compress_grads_to_send = compress_grads_to_send
        self.iter = 0
        self._runtime = runtime or ThreadRuntime()
        self._point = self._runtime.points(f"GWorker {index_worker}", incarnation)
        self._incarnation = incarnation
        self._journal = self._runtime.journal(f"GWorker {index_worker}", incarnation)
        self.col_workers = col_workers_factory(
            index_parent=index_worker, local_device=check_device(device), runtime=self._runtime,
            col_execution=col_execution, col_communication=col_communication, initial_weights=initial_weights,
            collects=collects, first_incarnation=_INCARNATIONS * incarnation, journal=self._journal)
        self.local_worker: CWorker = self.col_workers.local_worker()
        self.remote_workers: list[Handle[CWorker]] = self.col_workers.remote_workers()
        self.actor, self.algo, self.storage = self.local_worker.actor, self.local_worker.algo, self.local_worker.storage
        self.ledger = Ledger()
        self.collector = CollectorThread(
            index_worker, self.local_worker, self.remote_workers, col_fraction_workers, col_communication,
            col_execution, broadcast_interval, runtime=self.col_workers.runtime, ledger=self.ledger,
            fraction_samples=fraction_samples, col_in_flight=col_in_flight, queue_size=queue_size,
            queue_timeout_s=queue_timeout_s, supervisor=Supervisor(
                self.remote_workers, self.col_workers.replace, self.col_workers.runtime, on_worker_failure, worker_timeout_s,
                seed=index_worker))
        self.inqueue = self.collector.queue
        self._batches: Iterator[Batch] | None = None
        self._batch: Batch | None = None
        self._item_open = False  # an item is in the storage whose batches have not been made yet
        self._unused_steps = 0   # steps of the current item that no gradient has used
        self._report = Report()
        self._bad_batches = BadBatches(keep_bad_batches, index_worker, self.algo)
        self._fault = ""  # of the last gradient, before any averaging
        self._grads: list[Tensor] | None = None  # the last ones computed
        self._used = _Used(0, 0, True)
        self._microbatch_size = None if microbatch_size is None else check_count("microbatch_size", microbatch_size)
        self._train_batch_size = None if train_batch_size is None else check_count("train_batch_size", train_batch_size)
        self._prefetch = prefetch
        self._forgets = False  # each microbatch as soon as it has been differentiated
        if microbatch_size is not None:
            # Batches stay in host memory; one slice at a time goes to the device.
            self.storage.device = torch.device("cpu")
            self._forgets = train_batch_size is not None and not why_all_is_kept(self.algo.options, norm_over)
            self._warn_of_batch_norm()
        self._held_moments: list[dict[str, Moments]] = []  # of the current item, where ranks merge them themselves
        self._group: GradientGroup | None = None
        self._final: LedgerSnapshot | None = None

    def ready(self) -> int:
        """Answer once this worker and its collection workers are built."""
        self.col_workers.wait_ready()
        return self.index_worker

    def _warn_of_batch_norm(self) -> None:
        if self.index_worker == 0 and any(isinstance(module, _BatchNorm) for module in self.actor.modules()):
            warnings.warn("the actor has batch normalisation layers, which normalise over each slice of microbatch_size "
                          "env steps, not over the batch; use layer normalisation, or leave microbatch_size out", stacklevel=2)

    @property
    def actor_version(self) -> int:
        """Number of times the actor has been updated."""
        return self.local_worker.version

    def get_data(self) -> Batch:
        """Take the next batch; when the last item is used up, wait for the next one from `collector.queue`."""
        if self._batches is None:
            if not self._item_open:
                self._take_item()
            self._open_batches(None)
        assert self._batches is not None
        self._batch = next(self._batches)
        return self._batch

    def _take_item(self) -> None:
        start = self._runtime.now()
        rollouts, version = self._collect(), self.actor_version
        self._report.add_time("wait", self._runtime.now() - start)
        for rollout, version_queued in rollouts:
            self._report.add_rollout(rollout, version_queued, version)
        self._unused_steps = sum(rollout.num_env_steps for rollout, _ in rollouts)
        self.storage.insert_data_slice([decode(rollout) for rollout, _ in rollouts])
        self.storage.before_gradients()
        self._item_open = True

    def _collect(self) -> list[tuple[Rollout, int]]:
        """(rollout, version when it was queued) of the next item.

        An item is what the collector queued as one. Where synchronous collection makes larger train batches, it is whole
        rounds: a microbatch where it is forgotten after its use, else as many of those as the train batch takes.
        """
        if self._train_batch_size is None or self.col_communication is ASYNC:
            rollouts, version = self.collector.get()
            return [(rollout, version) for rollout in rollouts]
        microbatch = self._microbatch_size or self._train_batch_size
        target = microbatch if self._forgets else self._train_batch_size
        item: list[tuple[Rollout, int]] = []
        num_steps, goal = 0, microbatch
        while True:
            rollouts, version = self.collector.get()
            num_steps += sum(rollout.num_env_steps for rollout in rollouts)
            if num_steps >= goal:
                if num_steps >= target:
                    return [*item, *((rollout, version) for rollout in rollouts)]
                goal = num_steps + microbatch
            # The local worker hands out its storage's own rows, which its next rollout overwrites.
            item += [(own(rollout), version) for rollout in rollouts]

    @_with_part
    def prepare(self, weights: Weights | None = None, *,
                skip_remaining: bool = False) -> tuple[Moments, WorkersPart | None]:
        """Take the next item if the last is used up; (count, mean, M2) of its advantages, and the journal's part.

        Synchronous gradient workers normalise over all their items together, as one worker would over the whole.
        """
        if weights is not None:
            self.set_weights(weights)
        if skip_remaining:
            self.skip_remaining()
        if not self._item_open:
            self._take_item()
        return self.storage.advantage_moments(), self.take_part()

    def _open_batches(self, advantage_moments: Sequence[Moments] | None) -> None:
        if self._forgets:  # then each microbatch is normalised by itself, if at all
            advantage_moments = None
        elif self._group is not None and self.algo.advantage_normalization == "batch":
            advantage_moments = self._group.gather_all(self.storage.advantage_moments())
        if advantage_moments is not None:
            self.storage.normalize_advantages(*mean_and_std(advantage_moments))
        self._batches = self.algo.batches(self.storage)
        self._item_open = False

    def get_grads(self, distribute_gradients: bool = False) -> tuple[list[Tensor], dict[str, float]]:
        """Compute gradients of the batch that `get_data` took.

        Args:
            distribute_gradients: If True, gradients are averaged over all gradient workers here, for each to apply.

        Returns:
            One flat float32 gradient per optimised group, and the algorithm's statistics.
        """
        assert self._batch is not None, "get_data() comes first"
        batch = self._batch
        self._fault = ""
        if self._forgets:
            grads, info = self._accumulate_microbatches(distribute_gradients)
        else:
            grads, info = self.compute_gradients(batch, distribute_gradients)
            self.storage.after_gradients(batch, info)
            self._used = _Used(batch.num_samples, batch.num_new_samples, batch.last)
            self._unused_steps -= batch.num_new_samples
        self.ledger.move(self._used.num_new_samples, "queued", "sent")
        if self._used.last:
            self._batches = None
        self._grads = grads
        return grads, info

    def _accumulate_microbatches(self, distribute_gradients: bool) -> tuple[list[Tensor], dict[str, float]]:
        """The gradient of a whole train batch, of which no more than a microbatch is held at a time."""
        assert self._train_batch_size is not None
        total = GradAccumulator(self._microbatch_size, self.algo.loss_reduction)
        num_new = 0
        while True:
            batch = self._batch
            assert batch is not None
            num_new += batch.num_new_samples
            is_enough = num_new >= self._train_batch_size
            if self._prefetch and not is_enough:
                self.collector.ask_ahead(self._least_rounds())
            grads, info = self.compute_gradients(batch, False)
            self.storage.after_gradients(batch, info)
            total.add(grads, batch.num_samples, info)
            self._unused_steps -= batch.num_new_samples
            # Nothing refers to this microbatch any more when the next one is collected.
            self._batches = self._batch = None
            del batch
            self.storage.reset()
            if is_enough:
                break
            self.get_data()
        self._used = _Used(total.num_samples, num_new, True)
        grads = total.result()
        if distribute_gradients:
            grads = self._mean_of_ranks(grads, total.num_samples)
        return grads, self._decided(total.info())

    def _least_rounds(self) -> int:
        """Rounds without which there is no further microbatch; there may have to be more."""
        assert self._microbatch_size is not None
        largest = self.collector.num_workers * self.local_worker.num_envs * int(self.storage.options.size)
        return -(-self._microbatch_size // largest)

    def step(self, distribute_gradients: bool = False) -> tuple[list[Tensor], dict[str, float]]:
        """Take the next batch and compute its gradients; see `get_grads`."""
        self.get_data()
        return self.get_grads(distribute_gradients)

    def compute_gradients(self, batch: Batch, distribute_gradients: bool,
                          ) -> tuple[list[Tensor], dict[str, float]]:
        """Gradients of one batch.

        Args:
            batch: What the algorithm's loss needs.
            distribute_gradients: If True, average them over all gradient workers, weighted by their samples.

        Returns:
            One flat float32 gradient per optimised group, and the algorithm's statistics.
        """
        start = self._runtime.now()
        grads, info = self._differentiate(batch)
        if self._point is not None and self._point("grad"):
            grads = [torch.full_like(grad, torch.nan) for grad in grads]
        fault = self._bad_batches.find_fault(batch, grads, info, self.actor_version)
        self._fault = self._fault or fault
        if distribute_gradients:
            grads = self._mean_of_ranks(grads, batch.num_samples)
        self.iter += 1
        self._report.add_time("grad", self._runtime.now() - start)
        return grads, info

    def _differentiate(self, batch: Batch) -> tuple[list[Tensor], dict[str, float]]:
        """The gradient of a batch, made in one backward pass or in several."""
        counters = self._report.counters
        counters["microbatch_steps"] = batch.num_samples
        if self._microbatch_size is None:
            counters["backward_passes"] += 1
            return self.algo.compute_gradients(batch)
        accumulator = GradAccumulator(self._microbatch_size, self.algo.loss_reduction)
        for part in accumulator.slices(self.algo.prepare_batch(batch), self.algo.device):
            grads, info = self.algo.compute_gradients(part)
            accumulator.add(grads, part.num_samples, info)
        counters["backward_passes"] += accumulator.num_parts
        return accumulator.result(), self._decided(accumulator.info())

    def _decided(self, info: dict[str, float]) -> dict[str, float]:
        """Statistics of several parts: what the algorithm decides, it decides by their means."""
        if "skip_remaining" in info:
            info["skip_remaining"] = float(self.algo.skip_remaining(info))
        return info

    def _mean_of_ranks(self, grads: list[Tensor], num_samples: int) -> list[Tensor]:
        if self._group is None:
            raise RuntimeError("distribute_gradients=True needs join_group() first")
        return self._group.mean(grads, num_samples)

    def apply_gradients(self, gradients: list[Tensor] | None = None, *,
                        moments: tuple[dict[str, Moments], ...] = ()) -> dict[str, float] | None:
        """Make one update of the actor, and merge `moments` into its normalisers.

        Args:
            gradients: One gradient per optimised group; None takes those that `get_grads` gave last.
            moments: Of rollouts, for the normalisers.

        Returns:
            The algorithm's statistics; None if the gradient is not finite, so that no update was made: parameters,
            optimiser and version are as before. Whoever asked counts that.
        """
        gradients = self._grads if gradients is None else gradients
        if self._point is not None and self._point("update") and gradients is not None:
            gradients = [torch.full_like(gradient, torch.nan) for gradient in gradients]
        info: dict[str, float] | None = None
        with self._journal.writing():
            try:
                info = self.algo.apply_gradients(gradients)
            except NonFiniteUpdateError:
                logger.debug("GWorker %d makes no update of version %d", self.index_worker, self.actor_version,
                             exc_info=True)
            else:
                self.local_worker.version += 1
            if moments:  # what data say about themselves is finite, whatever became of the gradient
                self.local_worker.merge_moments(moments)
        return info

    def take_part(self) -> WorkersPart | None:
        """(name, incarnation, part) of what its journal noted since the last part was taken; None if it keeps none."""
        part = self._journal.take()
        return None if part is None else (f"GWorker {self.index_worker}", self._incarnation, part)

    @_with_part
    def collect_and_grad(self, weights: Weights | None = None, *, advantage_moments: Sequence[Moments] | None = None,
                         skip_remaining: bool = False, distribute_gradients: bool = False,
                         parameters: Mapping[str, float] | None = None) -> Gradients:
        """One request of the update worker: take weights, then data, then compute and pack a gradient.

        Args:
            weights: New weights, or None to go on with those it has.
            advantage_moments: Of the items of all gradient workers, if they normalise together.
            skip_remaining: Give up what is left of the current item first.
            distribute_gradients: Average and apply among the gradient workers; nothing but statistics comes back.
            parameters: The algorithm's parameters in force, where no weights bring them.
        """
        if weights is not None:
            self.set_weights(weights)
        if parameters is not None:
            self.algo.parameters = dict(parameters)
        if skip_remaining:
            self.skip_remaining()
        if self._item_open and advantage_moments is not None:
            self._open_batches(advantage_moments)
        version = self.actor_version
        self.get_data()
        grads, info = self.get_grads(distribute_gradients)
        report, used = self._report, self._used
        vectors: Any = grads
        skipped = False
        if distribute_gradients:
            self._held_moments += report.moments
            applied = self.apply_gradients(grads, moments=self._gather_held() if used.last else ())
            vectors, skipped, info = None, applied is None, {**info, **(applied or {})}
        elif self.index_worker > 0:
            vectors = [np.array(grad.detach().cpu().numpy()) for grad in grads]
            report.counters["bytes_raw"] += codecs.num_bytes(vectors)
            if self.compress_grads_to_send:
                vectors = [codecs.compress(vector) for vector in vectors]
            report.counters["bytes_sent"] += codecs.num_bytes(vectors)
        report.counters["weight_pushes"] = self.collector.weight_pushes
        report.counters["restarts"] = self.collector.restarts
        report.counters["queued_items"] = self.inqueue.qsize()
        self._report = Report(report)
        return Gradients(
            vectors=vectors, num_samples=used.num_samples, num_new_samples=used.num_new_samples,
            weights_version=version, worker=self.index_worker, incarnation=self._incarnation, sequence=self.iter, info=info,
            ledger=self.ledger.snapshot(), last=used.last, lags=tuple(report.lags), episodes=tuple(report.episodes),
            moments=() if distribute_gradients else tuple(report.moments), timings=report.timings, counters=dict(report.counters),
            part=self.take_part() if self.index_worker > 0 else None, fault=self._fault, skipped=skipped)

    def skip_remaining(self) -> None:
        """Give up what is left of the current item; steps that no gradient has used are dropped."""
        if self._batches is not None:
            self._batches = None
            self.ledger.drop(self._unused_steps, "queued", DropReason.EARLY_STOP)
        if self._held_moments:
            self.local_worker.merge_moments(self._gather_held())

    def _gather_held(self) -> tuple[dict[str, Moments], ...]:
        """The moments of all ranks' current items; every rank calls it at the same update."""
        assert self._group is not None
        held, self._held_moments = self._held_moments, []
        if self._train_batch_size is not None:  # ranks may have taken different numbers of rollouts
            held = merge_parts(held)
        return self._group.gather_moments(held)

    def set_weights(self, actor_weights: Weights | Mapping[str, Any]) -> None:
        """Update the actor with the given weights.

        Args:
            actor_weights: A `Weights` message, or an acting state by name.
        """
        self.local_worker.set_weights(actor_weights)

    def propose_address(self) -> tuple[str, int]:
        """An address of this host and a TCP port that is free there now."""
        return propose_address()

    def join_group(self, address: str, port: int, rank: int, size: int, timeout_s: float) -> None:
        """Become a rank of the group that averages gradients among the gradient workers."""
        self._group = GradientGroup(self._runtime.join_ranks(address, port, rank, size, timeout_s))

    def get_weights(self) -> Weights:
        """A snapshot of the acting state and its version."""
        return self.local_worker.get_weights()

    def save_model(self, fname: str) -> str:
        """Save the current actor as a torch-loadable checkpoint of plain types.

        Args:
            fname: Path of the file; its folder must exist.

        Returns:
            The path.
        """
        with self._journal.lock:
            state = {"format": 1, "version": self.actor_version, "acting_state": self.algo.acting_state()}
        torch.save(state, fname)
        return fname

    def update_algorithm_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Change one of the algorithm's updatable parameters; an unknown name raises `KeyError`."""
        self.local_worker.update_algorithm_parameter(parameter_name, new_parameter_value)

    def interrupt(self) -> None:
        """Signal: no data comes any more; a call that waits for data ends with `StoppedError`."""
        self.collector.interrupt()

    def stop(self) -> LedgerSnapshot:
        """Stop collecting and end the workers below. Idempotent.

        Returns:
            The final account; `collected` is what the collection workers themselves counted.
        """
        if self._final is None:
            self.collector.close(_STOP_TIMEOUT_S)
            closing = [handle.submit(CWorker.close) for handle in self.remote_workers]
            outcomes = self.col_workers.runtime.get_all(closing, _STOP_TIMEOUT_S)
            counts = [self.local_worker.close(), *(outcome.value for outcome in outcomes if outcome.value is not None)]
            self.ledger.collect(sum(undelivered for _, undelivered in counts))
            self.ledger.drop_all(DropReason.SHUTDOWN)
            # What the collectors counted themselves, so that the equation can fail; a lost one's count is lost with it.
            is_complete = len(counts) == 1 + len(outcomes)
            collected = sum(made for made, _ in counts) + self.collector.delivered_by_lost if is_complete else None
            for handle in self.remote_workers:
                self.col_workers.runtime.kill(handle)
            if self._group is not None:
                self._group.close()
            self._final = self.ledger.snapshot(collected)
        return self._final
