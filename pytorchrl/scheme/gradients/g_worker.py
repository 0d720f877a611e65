"""The gradient worker: a worker that computes gradients from the data of its collection workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar, cast

import numpy as np
import torch

from pytorchrl.agent.contracts import batch_of
from pytorchrl.agent.data import Batch
from pytorchrl.agent.multi.algorithm import MultiAgentAlgorithm
from pytorchrl.errors import CallOrderError, ConfigError, DrainingError
from pytorchrl.files.tensors import MODEL_FORMAT, save
from pytorchrl.runtime import WorkersPart
from pytorchrl.scheme.base.worker import Context, Worker
from pytorchrl.scheme.collection.c_worker_set import CWorkerSetFactory
from pytorchrl.scheme.collection.collector_thread import CollectorThread
from pytorchrl.scheme.collection.strategies import Barrier, OnArrival
from pytorchrl.scheme.gradients import microbatch as micro
from pytorchrl.scheme.gradients.assembly import assemble
from pytorchrl.scheme.gradients.gradient_computer import not_finite
from pytorchrl.scheme.gradients.process_group import Candidate, Meeting, Vectors
from pytorchrl.scheme.gradients.recipe import GWorkerRecipe
from pytorchrl.scheme.gradients.worker_stats import timed
from pytorchrl.scheme.ledger import DropReason, LedgerSnapshot
from pytorchrl.scheme.options.base import ASYNC, DEFAULT_EXECUTION, SYNC, Communication, Execution
from pytorchrl.scheme.options.collection import CollectionPattern
from pytorchrl.scheme.options.gradients import GWorkerOptions, GWorkerSetOptions
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet
from pytorchrl.scheme.transport.encoder import WEIGHTS, Encoder
from pytorchrl.scheme.transport.messages import Gradients, Moments, Parameters, Report, Weights, WholeState
from pytorchrl.support.threads import Stoppable
from pytorchrl.support.untyped import Payload, StateDict

# Each replacement of a GWorker starts its workers' incarnations at a new multiple of 64, so that none is reused.
_INCARNATIONS = 64
# Number of seconds that stop() waits for workers to end their current calls; stop() as a whole must take at most 10 s.
_STOP_TIMEOUT_S = 5.0

__all__ = ["CollectorThread", "GWorker"]

W = TypeVar("W", bound="GWorker")
P = ParamSpec("P")
R = TypeVar("R")


def errors_carry_part(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Decorate a worker's method so that an error of the method carries the journal's new events, as `error.part`.

    A successful call returns these events in its result, but a failed call has no result. The events are the result
    of `take_part`.
    """
    @functools.wraps(method)
    def call(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if self.index_worker > 0:  # the update worker reads the journal of the local worker (index 0) directly
                error.part = self.take_part()  # type: ignore[attr-defined]
            raise

    return call


class GWorker(Worker, Stoppable):
    """A worker that computes gradients from the data of its collection workers.

    Args:
        index_worker: Index in the set: 0 is local to the update worker, 1..N are remote.
        col_workers_factory: Factory of the set of collection workers; or a `GWorkerRecipe`, which contains this
            factory, all options of the worker, and the factory of the replay shards. The recipe takes the place of the
            next four arguments.
        col_communication: "synchronous" or "asynchronous" collection.
        compress_grads_to_send: Codec of gradients; see `GWorkerSet.Options`.
        col_execution: "Central" or "Parallel" collection.
        col_fraction_workers: Share of the collection workers that must finish a round before the others are preempted.
        initial_weights: Weights to start from; None keeps the actor's own initialization.
        device: "cpu" or "cuda:N", on which gradients are computed; None: the CPU.
        context: Runtime of the remote collection workers, incarnation and number of threads; None: the defaults.

    Attributes:
        index_worker, col_communication, compress_grads_to_send: As given.
        iter: Number of gradients computed.
        col_workers: The CWorkerSet; `local_worker` and `remote_workers` are its members.
        actor, algo, storage: The agent's parts, which the local collection worker has built.
        collector, inqueue: The CollectorThread, and the `queue.Queue` of train batches (`CollectorThread.queue`).
        encoder: Encoder of gradients.
        ledger: Ledger of the collection workers' env steps.
        replay_workers, shards: The RWorkerSet and the connection to it; None without replay shards.
        stats: Statistics for the next message to the update worker.
    """

    Options: TypeAlias = GWorkerOptions

    def __init__(self, index_worker: int, col_workers_factory: CWorkerSetFactory | GWorkerRecipe,  # noqa: PLR0913
                 col_communication: Communication | str = CollectionPattern.col_communication,
                 compress_grads_to_send: bool | str = GWorkerSetOptions.compress_grads_to_send,
                 col_execution: Execution | str = DEFAULT_EXECUTION,
                 col_fraction_workers: float = Barrier.Options.col_fraction_workers,
                 initial_weights: Weights | None = None, device: str | None = None, *,
                 context: Context | None = None) -> None:
        context = context or Context(initial_weights=initial_weights)
        super().__init__(index_worker, context.num_threads, context.numerics)
        recipe = col_workers_factory
        if not isinstance(recipe, GWorkerRecipe):
            recipe = GWorkerRecipe.from_arguments(
                recipe, {"compress_grads_to_send": compress_grads_to_send},
                {"col_execution": col_execution, "col_communication": col_communication,
                 "col_fraction_workers": col_fraction_workers})
        self.col_communication = ASYNC if isinstance(recipe.collection, OnArrival.Options) else SYNC
        self.compress_grads_to_send, self._incarnation = recipe.options.compress_grads_to_send, context.incarnation
        self._runtime = context.runtime
        self.encoder: Encoder = Encoder(recipe.compression, self._runtime.now)
        self._point = self._runtime.points(f"GWorker {index_worker}", context.incarnation)
        self._journal = self._runtime.journal(f"GWorker {index_worker}", context.incarnation)
        collects = index_worker > 0 or not recipe.options.is_parallel  # else it only stores the current parameters
        below = replace(context, incarnation=_INCARNATIONS * context.incarnation, journal=self._journal)
        self.col_workers = recipe.col_workers_factory(index_worker, device, collects=collects, context=below)
        self.local_worker, self.remote_workers = self.col_workers.local_worker(), self.col_workers.remote_workers()
        self.actor, self.algo, self.storage = self.local_worker.actor, self.local_worker.algo, self.local_worker.storage
        self.replay_workers: RWorkerSet | None = None
        if recipe.replay_workers_factory is not None and collects:
            self.replay_workers = recipe.replay_workers_factory(index_worker, context=below)
        parts = assemble(index_worker, recipe, self.col_workers, self.replay_workers, self._runtime, self._point)
        self.ledger, self.stats, self._group, self._plan = parts.ledger, parts.stats, parts.group, parts.plan
        self.shards, self.collector, self.inqueue = parts.shards, parts.collector, parts.collector.queue
        self.batch_source, self._gradients = parts.source, parts.gradients
        self._collected_before = 0  # env steps collected before the restored checkpoint
        self._preparing = 0  # the argument `number` of the latest call of `prepare`
        self._final: LedgerSnapshot | None = None

    def ready(self) -> int:
        """Wait until the collection workers and replay shards are built; return the index of this worker."""
        self.col_workers.wait_ready()
        if self.replay_workers is not None:
            self.replay_workers.wait_ready()
        return self.index_worker

    @property
    def parameters(self) -> Parameters:
        """Current values of the parameters of the algorithm and of the storage, such as the learning rate."""
        return dict(self.algo.parameters), dict(self.storage.parameters)

    @property
    def iter(self) -> int:
        """Number of gradients computed."""
        return self._gradients.num_computed

    @property
    def batch(self) -> Batch | None:
        """The batch that `get_data` returned, until its gradients are computed; otherwise None."""
        return self._gradients.batch

    @property
    def actor_version(self) -> int:
        """Number of updates of the actor so far."""
        return self.local_worker.version

    # Gradients

    def get_data(self) -> Batch:
        """Return the next batch for a gradient; if the current train batch is used up, wait for a new train batch."""
        batch = self._gradients.batch = self.batch_source.next()
        return batch

    def get_grads(self, distribute_gradients: bool = False) -> tuple[Vectors, dict[str, float]]:
        """Compute gradients of the batch that `get_data` returned.

        Args:
            distribute_gradients: If True, average gradients over all gradient workers, weighted by numbers of samples.

        Returns:
            One flat float32 gradient per parameter group, and the algorithm's statistics.

        Raises:
            CallOrderError: There is no batch, or its gradients were already computed.
        """
        if self._gradients.batch is None:
            raise CallOrderError("get_grads() needs a batch from get_data(), and uses each batch once; call get_data() "
                                 "first, or call step(), which does both")
        return self._gradients.differentiate_taken(distribute_gradients, self.get_data, self.compute_gradients)

    def step(self, distribute_gradients: bool = False) -> tuple[Vectors, dict[str, float]]:
        """Get the next batch and compute its gradients; see `get_grads`."""
        self.get_data()
        return self.get_grads(distribute_gradients)

    def compute_gradients(self, batch: Batch | Mapping[str, object],
                          distribute_gradients: bool) -> tuple[Vectors, dict[str, float]]:
        """Compute the gradients of one batch.

        Args:
            batch: A batch of the kind that the algorithm learns from, or a dictionary of its tensors; see `batch_of`.
                With several policies, only a `MultiBatch` is possible.
            distribute_gradients: If True, average gradients over all gradient workers, weighted by numbers of samples.

        Returns:
            One flat float32 gradient per parameter group, and the algorithm's statistics.

        Raises:
            ConfigError: A tensor of the dictionary is unknown or missing, or has a wrong shape or dtype.
        """
        if isinstance(batch, Mapping):
            if isinstance(self.algo, MultiAgentAlgorithm):
                raise ConfigError("an agent with several policies needs a MultiBatch, got a dictionary; take the batch "
                                  "of get_data()")
            batch = cast("Batch", batch_of(self.algo.learns_from, batch))
        return self._gradients.compute(batch, distribute_gradients)

    def apply_gradients(self, gradients: Vectors | None = None, *,
                        moments: tuple[dict[str, Moments], ...] = ()) -> dict[str, float] | None:
        """Update the actor once, and merge moments into its normalizers.

        Args:
            gradients: One gradient per parameter group; None: the gradients that this worker computed most recently.
            moments: Moments of rollouts, for the normalizers.

        Returns:
            The algorithm's statistics; None if the gradient is not finite. In this case, the parameters, the optimizer
            and the version do not change, and the caller has to count the skipped update.

        Raises:
            CallOrderError: Without `gradients`: no gradients were computed, or the latest batch had no samples.
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
        """Return (name, incarnation, events of the journal since the last call); None if the run is not recorded."""
        part = self._journal.take()
        return None if part is None else (f"GWorker {self.index_worker}", self._incarnation, part)

    @errors_carry_part
    def prepare(self, weights: Weights | None = None, *, skip_remaining: bool = False,
                parameters: Parameters | None = None, number: int = 0) -> tuple[Moments, WorkersPart | None]:
        """Load the next train batch, unless an unused one is already loaded; see `collect_and_grad` for the arguments.

        The update worker passes the returned moments to `collect_and_grad`, to normalize advantages over all gradient
        workers. If this worker itself collects a rollout for the batch, `preempt(number)` ends that rollout early.

        Returns:
            The moments of the advantages in the train batch, and new events of the journal; see `take_part`.
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
                         skip_remaining: bool = False, distribute_gradients: bool = False, check: bool = False,
                         parameters: Parameters | None = None, with_report: bool = True) -> Gradients:
        """Handle a request of the update worker: set weights, get a batch, and return its encoded gradient.

        Args:
            weights: New weights; None: the weights do not change.
            advantage_moments: Moments of all gradient workers' advantages; see `BatchSource.start_pass`.
            skip_remaining: Whether to discard the rest of the current train batch first.
            distribute_gradients: Whether to average the gradient over all gradient workers, and to apply the mean.
            check: Whether to include a checksum of the networks' parameters in the result.
            parameters: Values of options that change, such as `lr`; needed only without `weights`, which contain them.
            with_report: Whether the result contains a report; if not, the caller requests reports with `report`.
        """
        self._begin_request(weights, parameters, skip_remaining)
        if self.batch_source.is_loaded and advantage_moments is not None:
            self.batch_source.start_pass(advantage_moments)
        version = self.actor_version
        try:
            grads, info = self.step(distribute_gradients)
        except DrainingError:  # no data will arrive for this request
            grads, info, self._gradients.used = [], {}, micro.Used(0, 0, False)
        vectors: Payload = grads
        used, skipped = self._gradients.used, False
        if distribute_gradients:
            vectors, applied = self._apply_mean(grads)
            skipped, info = applied is None, {**info, **(applied or {})}
        elif self.index_worker > 0:
            with self.stats.watch.part("encode"):
                vectors = self.stats.pack(grads, self.encoder)
        return Gradients(
            vectors=vectors, num_samples=used.num_samples, num_new_samples=used.num_new_samples,
            weights_version=version, worker=self.index_worker, incarnation=self._incarnation, sequence=self.iter,
            info=info, ledger=self.ledger.snapshot(), last=used.last, samples=dict(used.samples),
            fault=self._gradients.fault, skipped=skipped, moments=self.stats.take_moments(),
            part=self.take_part() if self.index_worker > 0 else None, report=self.report() if with_report else None,
            checksum=self.get_weights(learning=True).checksum if check else None)

    def report(self) -> Report:
        """Return the statistics since the last report; the thread that computes gradients must call this method."""
        self.stats.traffic[WEIGHTS] += self.local_worker.take_weights_traffic()
        return self.stats.take(self.collector, self.batch_source, () if self.shards is None else self.shards.states)

    def _apply_mean(self, grads: Vectors) -> tuple[Vectors | None, dict[str, float] | None]:
        """Apply the mean gradient of all ranks to this worker's parameters. Each rank calls this method itself.

        Returns:
            The value of `Gradients.vectors` and the statistics of the update: [] and {} if no rank had data; None and
            None if the update was skipped; otherwise None and the algorithm's statistics.
        """
        moments, self.stats.moments = self.stats.moments, []  # moments are never sent twice, even if `shared` fails
        self._group.store(moments)
        if all(grad is None for grad in grads):  # no rank had data to learn from
            return [], {}
        with self.stats.watch.part("average"):
            shared = self._group.shared(self._gradients.used.last)
        with self.stats.watch.part("apply"):
            return None, self.apply_gradients(grads, moments=shared)

    def skip_remaining(self) -> None:
        """Discard the rest of the current train batch; the ledger counts the unused steps as dropped."""
        self.batch_source.skip_remaining(DropReason.EARLY_STOP)
        if self._group.is_member:
            self.local_worker.merge_moments(self._group.share())

    def preempt(self, number: int) -> None:
        """End the rollout that `prepare(number=number)` is collecting, once it has `BatchPlan.least_steps` steps."""
        if number == self._preparing:
            self.local_worker.preempt_running(self._plan.least_steps)

    # The group of ranks

    def join_group(self, meeting: Meeting, place: int, state: WholeState | None = None) -> None:
        """Join the group that averages gradients, as rank `place`.

        Args:
            meeting: Address at which the ranks connect.
            place: Rank of this worker.
            state: State from which all ranks continue; None: the state of this worker.

        Raises:
            RankLostError: Not all ranks connected.
        """
        if state is not None:
            self.local_worker.load_whole_state(state)
        self._group.join(self._runtime, meeting, place)

    def leave_group(self, generation: int) -> None:
        """Leave the current group if its generation number is at most `generation`; see `ProcessGroup.leave`."""
        self._group.leave(generation)

    def leave_and_propose(self, generation: int) -> Candidate:
        """Call `leave_group`, discard the train batch in use, and return a `Candidate` for the next group."""
        self._group.leave(generation)
        if not self.batch_source.is_loaded:
            self.batch_source.abandon(DropReason.WORKER_LOST)
            self._gradients.batch = None
        return Candidate(self.actor_version, self._incarnation, self.ledger.snapshot(), *self._runtime.meeting_place())

    # Weights

    @timed("decode")
    def set_weights(self, actor_weights: Weights | Mapping[str, np.ndarray | torch.Tensor]) -> None:
        """Copy weights into the actor.

        Args:
            actor_weights: A `Weights` message; or tensors by name: `actor.state_dict()`, or the algorithm's
                `acting_state()`.

        Raises:
            WeightsError: Names or shapes differ from those of the actor.
        """
        self.local_worker.set_weights(actor_weights)

    def get_weights(self, learning: bool = False) -> Weights:
        """Return a copy of the actor's weights; if `learning` is True, add state such as that of target networks."""
        with self._journal.lock:
            weights = self.local_worker.get_weights()
            return replace(weights, learning=self.local_worker.learning_state()) if learning else weights

    def whole_state(self) -> WholeState:
        """Return all state that updates change, such as parameters, normalizers and optimizers; see `WholeState`."""
        return self.local_worker.whole_state()

    def save_model(self, fname: str) -> str:
        """Save the actor for `torch.load(..., weights_only=True)`; return the path `fname`.

        A folder that does not exist is created.
        """
        with self._journal.lock:
            state = {"format": MODEL_FORMAT, "version": self.actor_version, "acting_state": self.algo.acting_state()}
        return save(fname, state)

    def update_algorithm_parameter(self, parameter_name: str, new_parameter_value: float) -> None:
        """Change one of the algorithm's updatable parameters; see `Algorithm.update_algorithm_parameter`."""
        self.local_worker.update_algorithm_parameter(parameter_name, new_parameter_value)

    def follow_schedules(self, env_steps: Callable[[], int], target_steps: int) -> None:
        """Set scheduled parameters to the current values of their schedules; see `CWorker.follow_schedules`."""
        self.local_worker.follow_schedules(env_steps, target_steps)

    # Resizes, checkpoints and shutdown

    def resize(self, num_col_workers: int | tuple[int, ...], resources: Mapping[str, float] | None = None) -> None:
        """Request a new number of collection workers for this worker; see `Resizing.request`."""
        self.collector.resize(num_col_workers, resources)

    @property
    def is_used_up(self) -> bool:
        """Whether the learner has used all data since `finish_collection`."""
        return self.collector.is_used_up

    def finish_collection(self) -> bool:
        """Let the learner use the data that are queued or in flight, and collect no more data before the next drain.

        Return whether there may be such data, which is only the case in asynchronous collection without shards.
        """
        if self.col_communication is SYNC or self.shards is not None:
            return False
        self.collector.finish_collection()
        return True

    def announce_drain(self, number: int) -> None:
        """Announce drain `number` (1, 2, ...), so that requests stop waiting for data and return without a gradient."""
        self.collector.announce_drain(number)

    @property
    def is_draining(self) -> bool:
        """Whether a drain (a wait until no data are in flight) has been announced, but is not complete yet."""
        return self.collector.is_draining

    def drain(self, number: int, timeout_s: float) -> tuple[int, LedgerSnapshot]:
        """Wait until no data are in flight below this worker; then drop unused data, except the data in replay.

        Args:
            number: Number of the drain: 1, 2, ...
            timeout_s: Number of seconds after which workers that have not responded count as lost.

        Returns:
            The worker's incarnation, and a ledger with nothing in flight or queued.
        """
        self.collector.drain(number, timeout_s)
        if not self.storage.provides.is_kept:  # keep batches drawn from replay: their steps stay resident
            self.batch_source.clear()
            self._gradients.batch = None
            self._group.discard()
        self.ledger.drop_all(DropReason.SHUTDOWN)
        return self._incarnation, self.ledger.snapshot()

    def state(self) -> StateDict:
        """Return this worker's state for a checkpoint; call `drain` before.

        The state contains the replay data, the ledger, the incarnation of each collection worker (the number increases
        by 1 when the worker is replaced), and the compression errors that the gradient codec will add to later
        gradients (error feedback). Parameters and optimizers are saved by the update worker; random generators and
        episodes are not saved.
        """
        if self.storage.keeps_unfinished:
            unfinished = self.col_workers.discard_unfinished()
            self.ledger.collect(unfinished)
            self.ledger.drop(unfinished, "in_flight", DropReason.SHUTDOWN)
        # Read the shards before the ledger: if a shard is found to be lost, the ledger changes.
        shards = None if self.shards is None else self.shards.state()
        return {"ledger": self.ledger.snapshot().saved(), "storage": self.storage.state_dict(), "shards": shards,
                "remainders": {place: torch.from_numpy(array.copy()) for place, array in self.encoder.kept.items()},
                "incarnations": self.col_workers.incarnations, "incarnation": self.local_worker.incarnation}

    def restore(self, state: StateDict) -> None:
        """Load a result of `state()`; call this method before anything is collected."""
        self.ledger.restore(LedgerSnapshot.from_saved(**state["ledger"]))
        self.encoder.kept = {place: array.numpy() for place, array in state["remainders"].items()}
        self.storage.load_state_dict(state["storage"])
        if self.shards is not None:
            self.shards.restore(state["shards"])
        self.col_workers.restore_incarnations(state["incarnations"])
        self.local_worker.incarnation = state["incarnation"]
        self.batch_source.restored()
        self._collected_before = self.ledger.snapshot().collected

    def reseed(self, seed: int) -> None:
        """Reseed this worker and its collection workers, as if they had just been built with this seed."""
        self.batch_source.clear()
        self._gradients.batch = None
        self.local_worker.reseed(seed)
        self.col_workers.reseed_remote(seed)

    def interrupt(self) -> None:
        """End collection. Calls that are waiting for data or for other ranks then raise an error."""
        self.collector.interrupt()
        self._group.leave()

    def stop(self) -> LedgerSnapshot:
        """Stop collection and all workers below this worker, and return the final ledger.

        The ledger's `collected` is the collection workers' own count of their steps. Repeated calls change nothing.
        """
        if self._final is None:
            self.collector.close(_STOP_TIMEOUT_S)
            made, undelivered = self.col_workers.stop(_STOP_TIMEOUT_S)
            self.batch_source.close(_STOP_TIMEOUT_S)
            self.ledger.collect(undelivered)
            self.ledger.drop_all(DropReason.SHUTDOWN)
            before = self._collected_before + self.collector.delivered_by_lost
            self._group.leave()
            # The collection workers count their steps themselves, so their count checks the ledger independently.
            self._final = self.ledger.snapshot(None if made is None else before + made)
        return self._final
