"""The scheme: where collection, gradients and updates run, and who waits for whom."""

from __future__ import annotations

import inspect
import math
import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytorchrl.agent.data import Episode
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import Factory
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.seeding import Stream, check_seed, derive_seed
from pytorchrl.errors import (
    CheckpointError,
    ConfigError,
    DeadlockError,
    ReplayError,
    StoppedError,
    WorkerDiedError,
    WorkerLostError,
)
from pytorchrl.runtime import DEFAULT_RESOURCES, Future, Handle, Runtime, make_runtime, options_of_runtime
from pytorchrl.scheme.architectures import NamedSchemes
from pytorchrl.scheme.base.worker import CENTRAL, PARALLEL, SYNC, Communication, Execution
from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
from pytorchrl.scheme.devices import devices_of, resources_of
from pytorchrl.scheme.gradients.g_worker_set import GWorkerSet
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.recording.record import RecordWriter, as_json, describe, differences, read_record
from pytorchrl.scheme.replay.r_worker_set import FREE, RWorkerSet
from pytorchrl.scheme.replay.shards import Shards
from pytorchrl.scheme.replay.storage_options import batch_steps, kept_by_shards, with_options
from pytorchrl.scheme.rules import Checks
from pytorchrl.scheme.supervision.evaluation import Evaluation, Evaluator
from pytorchrl.scheme.transport.encoder import DATA, WEIGHTS, Compression
from pytorchrl.scheme.transport.messages import Weights
from pytorchrl.scheme.updates.u_worker import UWorker
from pytorchrl.terminal import get_logger, printable
from pytorchrl.tracebacks import brief_errors_of

_MAX_EVALUATORS_LOST = 2  # retries of one evaluation after its worker was lost

logger = get_logger(__name__)


@brief_errors_of("__init__", "start", "resume")
class Scheme(NamedSchemes):
    """An agent, and where its three operations run. Everything is checked here; nothing starts before `start`.

    Args:
        algo_factory: Makes the algorithm, e.g. `PPO.create_factory(...)`.
        actor_factory: Makes the actor.
        storage_factory: Makes the storage.
        train_envs_factory: Makes each collection worker's environments.
        test_envs_factory: Makes the evaluation's environments; None: no evaluation.
        num_col_workers: Collection workers of each gradient worker; 1 means the local one, 2 or more are remote.
        col_execution: "Central" or "Parallel" collection; None follows num_col_workers.
        col_communication: "synchronous": collection and learning take turns; "asynchronous": neither waits.
        col_fraction_workers: Share of collection workers after which a synchronous round stops the rest: those of a gradient
            worker, or, where ranks that average among themselves collect by themselves, those ranks.
        fraction_samples: Share of its rollout that a worker so stopped collects all the same.
        compress_data_to_send: Codec of rollouts: False, True ("lz4"), a name ("lz4", "zstd") or "auto": lz4 while that saves
            time; see the page on compression.
        num_replay_workers: Shards of replay between collection and gradients, each with its share of the storage's size;
            1 is a thread of the learner's process. Needs asynchronous collection. None: transitions that are kept stay
            with the learner, which draws from them between rollouts.
        replay_worker_resources: Ray resources of each remote shard.
        learning_starts: Env steps that must have come into replay before learning begins; None: the algorithm's start_steps,
            or, with `VTraceBuffer`, train_batch_size.
        add_in_flight: Rollouts on their way to each shard, before collection waits.
        routing: Which shard a rollout is added to: "round_robin" (in turn), "random" (drawn uniformly, by `seed`),
            "least_loaded", or "by_stream" (one for each collection worker; always so for the sequences of `SequenceBuffer`, which
            go on from one rollout to the next).
        kind: What is drawn from shards: "transition", "sequence", or "batch": whole rollouts, for algorithms that correct for
            the age of their data (`IMPALA`, `APPO`) or learn from sequences (`R2D2`, with `RolloutSequenceBuffer`); None: what the
            storage is for.
        initial_priority: First priority of a transition in a storage with priorities: "max" (the largest that was seen) or
            "worker" (its TD error by the weights of the collection worker that made it).
        size: Env steps of replay in all; None: the storage's own. Replay of rollouts for `VTraceBuffer` needs it.
        prioritized: True makes a ReplayBuffer draw by priority, False a PERBuffer uniformly; None: as the storage does.
        alpha: How much priorities count; None: the storage's own.
        beta: How much importance weights correct for priorities; a number or a schedule; None: the storage's own.
        epsilon: What is added to each absolute error; None: the storage's own.
        stratified: Whether to draw once from each equal part of the priorities' sum; None: as the storage does.
        min_replay_ratio: Env steps consumed for each collected, below which collection waits for learning; None: never.
        max_replay_ratio: Env steps consumed for each collected, above which learning waits for collection; None: never.
        replay_debug: Whether statistics of shards have `evicted_hits` and `priority_change`, which takes time.
        num_grad_workers: Gradient workers; 1 means the local one, 2 or more are remote.
        grad_execution: "Central" or "Parallel" gradients; None follows num_grad_workers.
        grad_communication: "synchronous": one update from all gradients; "asynchronous": each as it comes.
        compress_grads_to_send: Codec of gradients: False, True ("lz4"), a name ("lz4", "zstd"; lossy "fp16", "bf16", "int8",
            "topk"), "auto" (bf16 while that saves time) or "auto:<name>".
        distribute_gradients: Gradient workers average gradients among themselves (gloo) and each applies the update.
        col_in_flight: Requests that each asynchronous collection worker always has.
        queue_size: Items (rollouts, or train batches) that may wait for an asynchronous learner; with num_replay_workers,
            batches asked of all shards together, or waiting.
        queue_policy: Where the queue is full: "block": collection waits; "drop_oldest", "drop_newest": an item is given up.
        queue_timeout_s: Seconds that a learner waits for data before it raises, or does what `on_starved` says.
        on_starved: What an asynchronous learner does that had no data for queue_timeout_s: "raise", "warn" (once, and wait
            on) or "wait".
        minibatch_buffer_size: Items that an asynchronous learner uses in turn, each `num_passes` times.
        num_passes: Uses of an item; each makes an update for every epoch and mini-batch of the algorithm.
        ramp: Whether the first items get 1, 2, ... uses, so that new ones come at equal intervals; None: if
            minibatch_buffer_size > 1.
        buffer: "ring": items take turns; "circular": the newest minibatch_buffer_size items are held, and drawn from.
        replay_proportion: Old rollouts that are mixed into train batches for each new one.
        replay_slots: Newest rollouts that are kept to be mixed in by replay_proportion.
        max_policy_lag: Updates by which a rollout's weights may be old when an asynchronous learner uses it first, and
            those of an item when it is used again; None: any.
        on_policy_lag: "drop": what is older is given up; "wait": workers are also not asked for what would be.
        broadcast_interval: Updates after which an asynchronous collection worker is given new weights.
        max_weight_sync_delay: Env steps of a collection worker after which it is given the newest weights, in place of
            broadcast_interval.
        train_batch_size: Steps that each learner is given for its next gradients, at least: whole rounds, or whole
            rollouts where collection is asynchronous; None: one. Steps in which an environment is reset fill it too. With
            num_replay_workers, transitions or sequences drawn for an update, None: the algorithm's mini_batch_size; of
            whole rollouts the least number of their steps (`VTraceBuffer`) or of their sequences (`RolloutSequenceBuffer`).
        microbatch_size: Most env steps of one backward pass; a larger batch is differentiated in slices, to the same
            result. None: no limit. With train_batch_size and synchronous collection it is also collected so, and forgotten
            piece by piece where the algorithm needs it once only.
        prefetch: Collected by pieces: microbatches, 0 or 1, that remote collection workers make while one is
            differentiated; None: 1 where there are any to make. With num_replay_workers: batches asked of each shard ahead
            of use; None: 4.
        norm_over: What an algorithm normalises over where it is collected by pieces, e.g. advantages: "batch" keeps the
            whole train batch in host memory, "microbatch" does not.
        updates_per_step: Updates that one `step()` makes; its statistics are means over them.
        aggregate: Asynchronous gradients, each of another gradient worker, that are averaged into one update.
        max_grad_lag: Updates that an asynchronous gradient may be behind; None: there is no limit.
        lag_policy: What becomes of a gradient whose lag l is above max_grad_lag = m: "apply" (as it is), "scale" (times
            (1 + m) / (1 + l)) or "drop".
        col_worker_resources: Ray resources of each remote collection worker; the default asks for a share of a GPU only where
            it computes on one, and shrinks to what there is.
        grad_worker_resources: Ray resources of each remote gradient worker; its default does the same.
        device: Device of the learner, "cpu", "cuda" or "cuda:N"; None is the CPU.
        grad_device: Device of remote gradient workers, "cpu", "cuda" (the GPU that Ray gave the worker) or "cuda:N"; None: "cuda"
            if the learner's is one and they are on Ray, else the learner's.
        col_device: Device of collection workers with an actor of their own, as `grad_device`; None is the CPU.
        num_threads: Torch threads of every worker, the learner included.
        col_num_threads: Those of each collection worker with a process of its own; None: `num_threads`.
        seed: Seed of everything; None draws one.
        runtime: "ray", "threads" (all workers in this process) or "simulated" (so, one at a time, on a virtual clock, the
            same run for the same seeds); None: ray where there are remote workers.
        schedule_seed: Of the simulated schedule: who goes first, and what is drawn for `costs`.
        costs: Virtual seconds by operation in the simulated runtime; see `Costs`.
        on_worker_failure: What becomes of a lost remote worker: "restart" (another takes its place, with the newest
            weights), "ignore" (the others go on without it) or "raise". Gradient workers that average among themselves go on
            from the whole state of one that is left; in a run that is recorded the loss of one raises.
        worker_timeout_s: A collection worker that gives nothing for so many seconds, or for ten times its longest
            rollout if that is more, is taken for hung and lost. A replacement may wait so long for room on the cluster.
        compress_weights_to_send: Codec of weights: False, True ("lz4"), a name ("lz4", "zstd"; lossy "fp16", "bf16"), "auto"
            (lz4 while that saves time) or "auto:<name>".
        faults: Failures to inject, such as "kill col.3 @ step 400; delay col.* 2s p=0.01"; see `FaultPlan`.
        address: Of a Ray cluster; None starts a local one unless RAY_ADDRESS names one.
        placement: Where Ray's nodes are several: None: all workers are spread over them; "colocate": each remote gradient
            worker is on one node with its own collection workers and shards.
        keep_bad_batches: Directory for the first batches of each gradient worker whose loss or gradient is not finite;
            None keeps none.
        record: File (a new one) for what decides the run beside its seed: who came first; written four times a second.
        replay: File that `record` wrote, of a run with the same settings wherever its workers were: the run is repeated bit for bit in
            the simulated runtime, to its end; where it cannot be, that is an error that names the event.

    Attributes:
        seed: The seed in force.
        settings: Every setting, JSON-able.

    Raises:
        ConfigError: Anything wrong or contradictory, all problems at once.
    """

    @checked_names
    def __init__(self, algo_factory: Factory[Any], actor_factory: Factory[Any], storage_factory: Factory[Any],  # noqa: PLR0913
                 train_envs_factory: Factory[Any], test_envs_factory: Factory[Any] | None = None, *,
                 num_col_workers: int = 1, col_execution: Execution | str | None = None, col_communication: Communication | str = SYNC,
                 col_fraction_workers: float = 1.0, fraction_samples: float = 0.25, compress_data_to_send: bool | str = False,
                 num_replay_workers: int | None = None, replay_worker_resources: Mapping[str, float] = FREE,
                 learning_starts: int | None = None, add_in_flight: int = 2, routing: str = "round_robin", kind: str | None = None,
                 initial_priority: str = "max", size: int | None = None, prioritized: bool | None = None, alpha: float | None = None,
                 beta: float | Schedule | None = None, epsilon: float | None = None, stratified: bool | None = None,
                 min_replay_ratio: float | None = None, max_replay_ratio: float | None = None, replay_debug: bool = False,
                 num_grad_workers: int = 1, grad_execution: Execution | str | None = None,
                 grad_communication: Communication | str = SYNC, compress_grads_to_send: bool | str = False,
                 distribute_gradients: bool = False, col_in_flight: int = 2, queue_size: int = 16,
                 queue_policy: str = "block", queue_timeout_s: float = 300.0, on_starved: str = "raise",
                 train_batch_size: int | None = None, microbatch_size: int | None = None, prefetch: int | None = None,
                 norm_over: str = "batch", minibatch_buffer_size: int = 1, num_passes: int = 1, ramp: bool | None = None,
                 buffer: str = "ring", replay_proportion: float = 0.0, replay_slots: int = 0, max_policy_lag: int | None = None,
                 on_policy_lag: str = "drop", broadcast_interval: int = 1, max_weight_sync_delay: int | None = None,
                 updates_per_step: int = 1, aggregate: int = 1, max_grad_lag: int | None = None, lag_policy: str = "apply",
                 col_worker_resources: Mapping[str, float] = DEFAULT_RESOURCES,
                 grad_worker_resources: Mapping[str, float] = DEFAULT_RESOURCES, device: str | None = None,
                 grad_device: str | None = None, col_device: str | None = None, num_threads: int = 1,
                 col_num_threads: int | None = None, seed: int | None = None, runtime: str | None = None, schedule_seed: int = 0,
                 costs: Mapping[str, Any] | None = None, faults: str | None = None, on_worker_failure: str = "restart",
                 worker_timeout_s: float = 60.0, compress_weights_to_send: bool | str = False, address: str | None = None,
                 placement: str | None = None, keep_bad_batches: str | os.PathLike[str] | None = None,
                 record: str | os.PathLike[str] | None = None, replay: str | os.PathLike[str] | None = None) -> None:
        given = {name: value for name, value in locals().items() if name not in _NOT_SETTINGS}
        self.algo_factory, self.actor_factory, self.storage_factory = algo_factory, actor_factory, storage_factory
        self.train_envs_factory, self.test_envs_factory = train_envs_factory, test_envs_factory
        checks = Checks(given, {name: parameter.default for name, parameter in inspect.signature(Scheme).parameters.items()})
        self._options = checks.run()
        if num_replay_workers is not None and isinstance(storage_factory, Factory):
            storage_factory = self.storage_factory = with_options(storage_factory, self._options)
            self._options["beta"] = None if beta is None else storage_factory.options.beta  # a Schedule, not what stood for it
        checks.agent(algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory)
        checks.microbatches(algo_factory)
        self._replay = None if replay is None else read_record(replay)
        self._has_drawn_seed = seed is None
        if seed is None:
            seed = secrets.randbits(32) if self._replay is None else self._replay.settings["seed"]
        self.seed = check_seed(seed)
        self.settings: dict[str, Any] = {**{
            name: str(value) if isinstance(value, (Execution, Communication, Schedule)) else
            dict(value) if isinstance(value, Mapping) else value for name, value in self._options.items()}, "seed": self.seed}
        if self._replay is not None:
            self._replay.check(self.settings, self._agent)
            checks.warnings.extend(filter(None, [self._replay.warning()]))
        for text in checks.warnings:
            warnings.warn(printable(text), stacklevel=4)  # the line of the caller, two decorators above this constructor
        self._runtime: Runtime | None = None
        self._worker: UWorker | None = None
        self._evaluator: Handle[Evaluator] | None = None
        self._evaluation: Future[Evaluation | None] | None = None
        self._to_evaluate: tuple[Weights, int] | None = None
        self._evaluators_lost = 0
        self._final: LedgerSnapshot | None = None
        self._threads_before: int | None = None
        self._checkpoint: Mapping[str, Any] | None = None  # to go on from
        self._part = 0

    @property
    def _agent(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (
            "algo_factory", "actor_factory", "storage_factory", "train_envs_factory", "test_envs_factory")}

    def __repr__(self) -> str:
        agent = [f"  {name}={factory!r}" for name, factory in self._agent.items()]
        return "Scheme(\n" + ",\n".join([*agent, *(f"  {k}={v!r}" for k, v in self.settings.items())]) + ")"

    # Life

    @property
    def _runtime_name(self) -> str:
        name: str = self._options["runtime"]
        return name if self.has_remote_workers or name == "simulated" else "threads"

    @property
    def runtime(self) -> Runtime | None:
        """Where its workers run; None before it was started and after it was stopped."""
        return self._runtime

    @property
    def has_remote_workers(self) -> bool:
        """Whether any worker runs outside this process."""
        return PARALLEL in (self._options["col_execution"], self._options["grad_execution"]) \
            or (self._options["num_replay_workers"] or 0) > 1

    def start(self, target_steps: int = 1, announce: Callable[[str], None] | None = None) -> UWorker:
        """Build the worker tree, as `step` does. Schedules end at `target_steps`; `announce` is called with progress of the start.

        Raises:
            StartError: The resources are not there, Ray cannot be reached, or a worker did not come up.
        """
        if self._final is not None:
            raise StoppedError("this scheme has been stopped; build a new one")
        if self._worker is None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(self._options["num_threads"])
            options = self._options
            self._check_target(target_steps)
            record = None if options["record"] is None else RecordWriter(
                options["record"], self.settings, self._agent, target_steps)
            self._runtime = make_runtime(
                options_of_runtime(self._runtime_name, options), seed=self.seed, is_recording=record is not None,
                replay=None if self._replay is None else self._replay.parts)
            self._runtime.announce = announce
            try:
                self._worker = self._build(self._runtime, target_steps, record)
                self._worker.ready()
                if self._checkpoint is not None:
                    self._part = self._checkpoint["part"]
                    self._worker.restore(self._checkpoint["state"], self._part_seed)
                    self._checkpoint = None
            except BaseException:
                if record is not None:
                    record.discard()
                self.stop()
                raise
        return self._worker

    def _check_target(self, target_steps: int) -> None:
        if self._replay is not None and self._replay.target_steps != target_steps:
            raise ConfigError(f"replay {self._replay.path!r} has target_steps={self._replay.target_steps}, got {target_steps}; give the same")

    def _build(self, runtime: Runtime, target_steps: int, record: RecordWriter | None) -> UWorker:
        options = self._options
        num_grad, num_col = options["num_grad_workers"], options["num_col_workers"]
        grad_remote = num_grad if options["grad_execution"] is PARALLEL else 0
        col_remote = num_col * max(1, grad_remote) if options["col_execution"] is PARALLEL else 0
        num_shards = options["num_replay_workers"]
        shards_remote = num_shards * max(1, grad_remote) if (num_shards or 0) > 1 else 0
        grad_resources, col_resources, shard_resources = runtime.fit_resources([
            ("gradient workers", grad_remote, resources_of(options, "grad")),
            ("collection workers", col_remote, resources_of(options, "col")),
            ("replay shards", shards_remote, options["replay_worker_resources"])])
        devices = devices_of(options)
        col_factory = CWorkerSet.create_factory(
            num_col, self.algo_factory, self.actor_factory, self.storage_factory, self.train_envs_factory,
            worker_resources=col_resources, compress_data_to_send=Compression.of(DATA, options["compress_data_to_send"]) or False,
            seed=self.seed, num_threads=options["col_num_threads"] or options["num_threads"], num_parents=max(1, grad_remote),
            initial_priority=options["initial_priority"], col_device=devices["col"])
        replay_level: dict[str, Any] = {}
        if num_shards is not None:
            replay_level["replay_workers_factory"] = RWorkerSet.create_factory(
                num_shards, self.algo_factory, self.actor_factory, kept_by_shards(self.storage_factory, options["size"]),
                shard_resources, self.seed, options["num_threads"], options["replay_debug"])
            replay_level["replay_options"] = {"batch_size": options["train_batch_size"], "options": Shards.Options(**{
                name: options[name] for name in ("learning_starts", "prefetch", "add_in_flight", "routing", "queue_size",
                                                 "min_replay_ratio", "max_replay_ratio")}),
                "batch_steps": batch_steps(self.storage_factory, self.train_envs_factory, options["train_batch_size"]),
                "num_passes": getattr(self.algo_factory.options, "num_epochs", 1) if options["kind"] == "batch" else 1}
        compress_weights = Compression.of(WEIGHTS, options["compress_weights_to_send"]) or False
        grad_factory = GWorkerSet.create_factory(
            num_grad, col_factory, options["col_fraction_workers"], options["col_execution"],
            options["col_communication"], options["compress_grads_to_send"], grad_resources,
            num_threads=options["num_threads"], grad_device=devices["grad"], **replay_level, **{name: options[name] for name in (
                "fraction_samples", "col_in_flight", "queue_size", "queue_policy", "queue_timeout_s", "on_starved",
                "train_batch_size", "microbatch_size", "norm_over", "minibatch_buffer_size", "num_passes", "ramp", "buffer",
                "replay_proportion", "replay_slots", "max_policy_lag", "on_policy_lag", "broadcast_interval",
                "max_weight_sync_delay", "keep_bad_batches", "on_worker_failure", "worker_timeout_s")},
            prefetch=0 if num_shards is not None else options["prefetch"],
            compress_weights_to_send=compress_weights if col_remote else False)
        collect_themselves = options["col_execution"] is CENTRAL and options["col_communication"] is SYNC
        return UWorker(
            grad_factory, grad_execution=options["grad_execution"], grad_communication=options["grad_communication"],
            distribute_gradients=options["distribute_gradients"], device=options["device"], runtime=runtime,
            target_steps=target_steps, request_timeout_s=2 * options["queue_timeout_s"],
            on_worker_failure=options["on_worker_failure"], record=record, replay=self._replay,
            col_fraction_workers=options["col_fraction_workers"] if collect_themselves else 1.0,
            compress_weights_to_send=False if options["distribute_gradients"] else compress_weights, **{
                name: options[name] for name in (
                    "updates_per_step", "aggregate", "max_grad_lag", "lag_policy", "worker_timeout_s")})

    @property
    def replay_is_over(self) -> bool | None:
        """Whether a replayed run has come to its end; None where none is replayed."""
        return None if self._replay is None else self._replay.is_over(0 if self._worker is None else self._worker.num_rounds)

    @property
    def update_worker(self) -> UWorker:
        """The root of the worker tree; starts it if need be."""
        return self._worker or self.start()

    def step(self) -> dict[str, float]:
        """Make `updates_per_step` updates (or, where a thread makes them, wait until so many more were made).

        An update whose loss or gradient is not finite is left out: nothing changes, and `metrics()` counts it as
        `updates_skipped_nan`.

        Returns:
            The algorithm's statistics, means weighted by samples; empty if the update was left out.

        Raises:
            NonFiniteUpdateError: More than five updates in a row were left out.
            ReplayError: A replayed run does not follow its record, or goes on beyond its end.
            Exception: Whatever ended a worker or thread.
        """
        try:
            return (self._worker or self.start()).step()
        except DeadlockError as deadlock:
            if self._replay is None:
                raise
            raise ReplayError(f"the replayed run does not follow its record {self._replay.path!r}: {deadlock}") from deadlock

    def drain(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Bring to an end whatever is underway, so that nothing is in flight or queued; the next `step()` goes on.

        Nobody is asked for anything more. Rollouts that are being made are finished; replay takes them, and what is in
        replay stays. Gradients and data that no update has used are given up, as `dropped["shutdown"]`. At most the update
        that a thread is making is made.

        Args:
            timeout_s: Seconds; workers that have given nothing by then are lost.

        Returns:
            The ledger.

        Raises:
            ConfigError: A time that is none, or the run is recorded or replayed.
            Exception: Whatever ended a worker or thread.
        """
        self._check_timeout(timeout_s)
        if self._worker is not None and self._final is None:
            self._worker.drain(timeout_s)
        return self.ledger()

    @staticmethod
    def _check_timeout(timeout_s: object) -> None:
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
            raise ConfigError(f"timeout_s must be a number of seconds > 0, got {timeout_s!r}")

    def checkpoint(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Everything that a scheme with the same settings needs to go on from here, see `resume`; this one goes on, too.

        It comes after a `drain`. From it on both go on alike: environments begin new episodes, and all draws new sequences, from
        seeds that follow from the experiment's and the number of checkpoints so far. So no state of an environment, a
        generator or a process has to be kept, and where collection and gradients are synchronous, on a CPU, the scheme that
        resumes computes what this one does, bit for bit.

        Args:
            timeout_s: As of `drain`.

        Returns:
            Plain values and tensors: parameters, optimisers, targets, normalisers, schedules, what is in replay, the ledger,
            remainders of lossy gradients. Anything of it may be a live part of this scheme: save it before the next step.

        Raises:
            ConfigError: The run is recorded or replayed.
            StoppedError: After `stop()`.
            Exception: Whatever ended a worker or thread.
        """
        self._check_timeout(timeout_s)
        if self._final is not None:
            raise StoppedError("this scheme has been stopped; make checkpoints before")
        worker = self.update_worker
        self._part += 1
        state = worker.checkpoint(self._part_seed, timeout_s)
        return {"format": _CHECKPOINT_FORMAT, "settings": as_json(self.settings), "agent": describe(self._agent),
                "part": self._part, "state": state}

    def resume(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from the `checkpoint()` of a scheme with the same settings, once started. A seed that was drawn becomes its seed.

        Where workers run and what they ask for may differ, and so may what is done about faults and evaluation.

        Raises:
            CheckpointError: It is of another kind of agent or scheme; all differences are named.
            ConfigError: This scheme has been started, is recorded, or is a replay.
        """
        if self._worker is not None or self._final is not None:
            raise ConfigError("only a scheme that has not been started can resume; build a new one")
        if self._options["record"] is not None or self._replay is not None:
            raise ConfigError("a run that resumes cannot be recorded or replayed; leave record and replay out")
        if checkpoint.get("format") != _CHECKPOINT_FORMAT:
            raise CheckpointError(f"not a checkpoint of this version: its format is {checkpoint.get('format')!r}, expected "
                                  f"{_CHECKPOINT_FORMAT!r}")
        if self._has_drawn_seed:
            self.seed = self.settings["seed"] = checkpoint["settings"]["seed"]
        agent = {name: part for name, part in self._agent.items() if name != "test_envs_factory"}
        problems = differences(checkpoint["settings"], self.settings, checkpoint["agent"], agent, _FREE_TO_RESUME)
        if problems:
            raise CheckpointError(f"the checkpoint is of another run: {'; '.join(problems)}; use the settings that it was made with")
        self._checkpoint = checkpoint

    @property
    def _part_seed(self) -> int:
        """Of what comes after the last checkpoint."""
        return derive_seed(self.seed, Stream.PART, self._part)

    @property
    def is_between_items(self) -> bool:
        """Whether a checkpoint now would give up no data that is to be used again; always, where collection is asynchronous."""
        return self._worker is None or self._worker.is_between_items

    def stop(self) -> dict[str, Any]:
        """End every worker, thread and process of this scheme. Idempotent.

        Returns:
            The final ledger, in which nothing is in flight or queued.
        """
        if self._final is None:
            if self._evaluator is not None:
                self._evaluator.signal(Evaluator.interrupt)
            try:
                self._final = self._worker.stop() if self._worker is not None else LedgerSnapshot()
            finally:
                self._abandon()
        return self._final.to_dict()

    def _abandon(self) -> None:
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None
        self._evaluator = self._evaluation = None
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    # What it knows

    @property
    def version(self) -> int:
        """Number of updates made."""
        return 0 if self._worker is None else self._worker.actor_version

    @property
    def env_steps(self) -> int:
        """Env steps collected, as of the last messages."""
        return 0 if self._worker is None else self._worker.statistics.tree_ledger.collected

    def ledger(self) -> dict[str, Any]:
        """Where every env step is; see `LedgerSnapshot`. Its equation always holds."""
        if self._final is not None:
            return self._final.to_dict()
        return (LedgerSnapshot() if self._worker is None else self._worker.statistics.tree_ledger.total()).to_dict()

    def metrics(self) -> dict[str, Any]:
        """Counters, lags, bytes and times; see `Statistics.metrics`."""
        return self.update_worker.statistics.metrics() if self._final is None or self._worker else {}

    def episodes(self) -> list[Episode]:
        """Training episodes that ended since the last call."""
        return [] if self._worker is None else self._worker.statistics.take_episodes()

    # What it can be asked

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Change an updatable parameter of the algorithm in every worker."""
        self.update_worker.update_algorithm_parameter(name, value)

    def acting_state(self) -> dict[str, torch.Tensor]:
        """A copy of what is needed to act: flat parameters and normalisers, by name."""
        state = self.update_worker.get_weights().state
        return {key: torch.as_tensor(value).clone() for key, value in state.items()}

    def save_model(self, path: str) -> str:
        """Save the actor as a file that `torch.load(path, weights_only=True)` reads."""
        return self.update_worker.save_model(path)

    def start_evaluation(self, num_episodes: int) -> None:
        """Begin an evaluation of the current weights on a worker of its own; training goes on.

        Raises:
            ConfigError: There are no test environments.
        """
        if self.test_envs_factory is None:
            raise ConfigError("evaluation needs test_envs_factory, which is None")
        self._to_evaluate, self._evaluators_lost = (self.update_worker.get_weights(), num_episodes), 0
        self._ask_evaluator()

    def _ask_evaluator(self) -> None:
        assert self._runtime is not None
        assert self._to_evaluate is not None
        if self._evaluator is None:
            remote = self.has_remote_workers
            runtime = self._runtime if remote else self._runtime.in_process()
            self._evaluator = runtime.start_actor(
                Evaluator, {"index_worker": 1, "algo_factory": self.algo_factory, "actor_factory": self.actor_factory,
                            "test_envs_factory": self.test_envs_factory, "seed": self.seed,
                            "num_threads": self._options["num_threads"] if remote else None},
                name="Evaluator", resources={"num_cpus": 0})
        self._evaluation = self._evaluator.submit(Evaluator.evaluate, *self._to_evaluate)

    def poll_evaluation(self) -> Evaluation | None:
        """The evaluation if it is finished, else None; each is given once. If its worker is lost, another begins anew."""
        if self._evaluation is None or self._evaluator is None:
            return None
        if not self._evaluator.runtime.wait([self._evaluation], 0.0):
            return None
        return self._take_evaluation(1.0)

    def wait_evaluation(self, timeout_s: float) -> Evaluation | None:
        """Wait for the running evaluation; None if there is none. Its error is raised."""
        evaluation = None
        while evaluation is None and self._evaluation is not None:
            evaluation = self._take_evaluation(timeout_s)
        return evaluation

    def _take_evaluation(self, timeout_s: float) -> Evaluation | None:
        assert self._evaluation is not None
        assert self._evaluator is not None
        future, self._evaluation = self._evaluation, None
        outcome = self._evaluator.runtime.outcome(future, timeout_s)
        if not isinstance(outcome.error, WorkerDiedError):
            return outcome.unwrap()
        self._evaluators_lost += 1
        if self._options["on_worker_failure"] == "raise" or self._evaluators_lost > _MAX_EVALUATORS_LOST:
            raise WorkerLostError(str(outcome.error)) from outcome.error
        logger.warning("%s; another evaluates anew", outcome.error)
        self._evaluator = None
        self._ask_evaluator()
        return None


_CHECKPOINT_FORMAT = "pytorchrl checkpoint 1"
# Beside those that a record may differ in.
_FREE_TO_RESUME = {"faults", "on_worker_failure"}
_NOT_SETTINGS = {"self", "algo_factory", "actor_factory", "storage_factory", "train_envs_factory", "test_envs_factory",
                 "__class__"}
