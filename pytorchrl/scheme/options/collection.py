"""Options of collection, and its three kinds, which determine how a gradient worker receives data.

A kind inherits the options of the collection workers, the collector thread and the batches, as far as they affect it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeAlias

from pytorchrl.agent.dataset import SUFFIX, is_file
from pytorchrl.agent.options import Options, option
from pytorchrl.errors import ConfigError, Problem
from pytorchrl.runtime import DEFAULT_RESOURCES
from pytorchrl.scheme.options.base import (
    CENTRAL,
    PARALLEL,
    SYNC,
    Communication,
    Execution,
    Kind,
    QueueOptions,
    check_codec,
    check_resources,
)
from pytorchrl.scheme.options.gradients import GWorkerOptions, MicrobatchCollectionOptions, MicrobatchOptions
from pytorchrl.scheme.options.replay import RWorkerSetOptions
from pytorchrl.scheme.transport.encoder import DATA

# The options that choose the kind of collection.
_CHOICES = ("col_communication", "num_replay_workers")
INITIAL_PRIORITIES = ("max", "worker")
INFERENCE = ("worker", "central")
QUEUE_POLICIES = ("block", "drop_oldest", "drop_newest")
STARVED_POLICIES = ("raise", "warn", "wait")
LAG_POLICIES = ("drop", "wait")
BUFFERS = ("ring", "circular")


@dataclass(frozen=True, kw_only=True)
class CWorkerOptions(Options):
    """Options of the collection workers of each gradient worker."""

    num_col_workers: int | tuple[int, ...] = option(
        1, low=1, help="Collection workers of each gradient worker, or one number for each gradient "
        "worker. By default, a single worker runs in the gradient worker's process; 2 or more are always remote.")
    col_execution: Execution | None = option(
        None, help="Where collection runs: \"Central\" in the gradient worker's process, \"Parallel\" in remote "
        "workers, even if there is only one. None: \"Central\" for one collection worker, \"Parallel\" for several.")
    compress_data_to_send: bool | str = option(
        False, check=check_codec(DATA),
        help="Codec of rollouts: False, True (\"lz4\"), \"lz4\", \"zstd\", or \"auto\", which uses lz4 if that "
        "saves time.")
    col_worker_resources: Mapping[str, float] = option(
        default_factory=lambda: dict(DEFAULT_RESOURCES),
        check=partial(check_resources, "col_worker_resources"),
        help="Ray resources of each remote collection worker. The default includes a share of a GPU only for workers "
        "that compute on a GPU, and is reduced to the available resources.")
    col_device: str | None = option(
        None, help="Device of collection workers that have their own copy of the actor: \"cpu\", \"cuda\" (on "
        "Ray, the GPU that is assigned to the worker; otherwise, remote workers take turns among all GPUs) or "
        "\"cuda:N\"; None: the CPU or, with central inference, the learner's device.")
    col_num_threads: int | None = option(
        None, low=1, help="PyTorch threads of each remote collection worker; None: num_threads.")

    inference: str = option(
        "worker", choices=INFERENCE, help="Where the actions of asynchronous collection are chosen: by each collection "
        "worker for its own environments (\"worker\"), or by one actor in the gradient worker's process for the "
        "environments of all collection workers, which then only step environments (\"central\").")
    inference_batch: int | None = option(
        None, low=1, help="With central inference, the number of collection workers whose actions are chosen together; "
        "None: half of them, so that one half steps while actions are chosen for the other.")

    def contradictions(self) -> Iterator[Problem]:
        """Refuse options that need central inference, and options that contradict it."""
        yield from super().contradictions()
        if not self.infers_centrally:
            yield from self._without_effect(["inference_batch"], "inference='central'", "inference")
            return
        if self.compress_data_to_send:
            yield Problem("inference='central' contradicts compress_data_to_send: rollouts are assembled in the "
                          "process that uses them, and never sent", "leave one of the two options out",
                          ("inference", "compress_data_to_send"))
        if self.inference_batch is not None and self.inference_batch > min(self.numbers()):
            yield Problem(
                f"inference_batch must not exceed the number of collection workers, got {self.inference_batch} > "
                f"{min(self.numbers())}", "lower inference_batch", ("inference_batch", "num_col_workers"))

    @property
    def infers_centrally(self) -> bool:
        """Whether one actor chooses the actions of all collection workers of a gradient worker."""
        return self.inference == "central"

    @property
    def num_workers(self) -> int:
        """The largest number of collection workers that any gradient worker has."""
        return max(self.numbers())

    @property
    def is_parallel(self) -> bool:
        """Whether the collection workers are remote."""
        return self.num_workers > 1 if self.col_execution is None else self.col_execution is PARALLEL

    def numbers(self, num_parents: int = 1) -> tuple[int, ...]:
        """Return how many collection workers each of the `num_parents` gradient workers has."""
        given = self.num_col_workers
        return given if isinstance(given, tuple) else (given,) * num_parents


@dataclass(frozen=True, kw_only=True)
class ReplayCWorkerOptions(CWorkerOptions):
    """Options of collection workers that feed replay shards."""

    initial_priority: str = option(
        "max", choices=INITIAL_PRIORITIES, help="Initial priority of a transition in prioritized replay: \"max\" is "
        "the largest priority so far, \"worker\" is the transition's TD error under the weights that collected it.")


@dataclass(frozen=True, kw_only=True)
class CollectorOptions(Options):
    """Options that control how long the learner waits for data."""

    queue_timeout_s: float = option(
        300.0, low=0.0, exclusive=True, help="Seconds that a learner waits for data before it raises an error or, "
        "in asynchronous collection, reacts according to on_starved.")


@dataclass(frozen=True, kw_only=True)
class BarrierOptions(Options):
    """Options of synchronous collection."""

    col_fraction_workers: float = option(
        1.0, low=0.0, high=1.0, exclusive=True, help="Share of the collection workers whose rollouts must be "
        "complete before a synchronous round preempts the other workers. It applies to the workers of each "
        "gradient worker or, in decentralized schemes, to gradient workers that collect themselves.")
    fraction_samples: float = option(
        0.25, low=0.0, high=1.0, exclusive=True, help="Smallest share of a rollout that a preempted worker "
        "collects.")
    on_straggler: str = option(
        "cut", choices=("cut", "finish"), help="Treatment of a preempted rollout: with \"finish\", the worker "
        "collects its rest at the start of the next round, so that all workers contribute equally many steps; with "
        "\"cut\", slow workers contribute fewer steps.")

    def contradictions(self) -> Iterator[Problem]:
        """Refuse options for preempted workers if no worker is ever preempted."""
        yield from super().contradictions()
        if self.col_fraction_workers == 1.0:
            yield from self._without_effect(
                ["fraction_samples", "on_straggler"], "col_fraction_workers < 1, because no worker is stopped "
                "otherwise", "col_fraction_workers")

    @property
    def finishes_stragglers(self) -> bool:
        """Whether a preempted worker collects the rest of its rollout in the next round."""
        return self.on_straggler == "finish"


@dataclass(frozen=True, kw_only=True)
class OnArrivalOptions(Options):
    """Options of asynchronous collection."""

    col_in_flight: int | None = option(
        None, low=1, help="Largest number of requests in flight to each asynchronous collection worker. None: 1; for "
        "data of any age (replay, buffer=\"circular\"), 2.")
    broadcast_interval: int = option(
        1, low=1, help="Number of updates (not seconds) after which an asynchronous collection worker receives new "
        "weights.")
    max_weight_sync_delay: int | None = option(
        None, low=1, help="Number of env steps after which a collection worker receives the newest weights; "
        "replaces broadcast_interval.")

    def contradictions(self) -> Iterator[Problem]:
        """Refuse `broadcast_interval` together with `max_weight_sync_delay`."""
        yield from super().contradictions()
        if self.max_weight_sync_delay is not None and self.broadcast_interval != 1:
            yield Problem("max_weight_sync_delay replaces broadcast_interval", "set only one of them",
                          ("max_weight_sync_delay", "broadcast_interval"))

    @property
    def longest_interval(self) -> int:
        """Number of updates after which a worker receives new weights; a subclass may return a smaller number."""
        return self.broadcast_interval


@dataclass(frozen=True, kw_only=True)
class SampleQueueOptions(QueueOptions):
    """Options of the queue of train batches between asynchronous collection and the learner."""

    queue_policy: str = option(
        "block", choices=QUEUE_POLICIES, help="Reaction to a full queue: with \"block\", rollouts are not requested "
        "until there is space; with \"drop_oldest\" and \"drop_newest\", collection never waits, and a train batch is "
        "dropped.")
    on_starved: str = option(
        "raise", choices=STARVED_POLICIES, help="Reaction of an asynchronous learner that gets no data for "
        "queue_timeout_s: \"raise\" an error, \"warn\" once and keep waiting, or \"wait\" without a warning.")
    minibatch_buffer_size: int = option(
        1, low=1, help="Number of train batches that an asynchronous learner uses alternately, each num_passes times.")
    num_passes: int = option(
        1, low=1, help="Number of uses of a train batch; in each use, the algorithm makes one update for each minibatch"
        " of each epoch.")
    ramp: bool | None = option(
        None, help="Whether the first train batch is used once, the second one twice, and so on up to num_passes, so "
        "that new train batches are needed at equal intervals; None: True if minibatch_buffer_size > 1.")
    buffer: str = option(
        "ring", choices=BUFFERS, help="Order of train batches: \"ring\" uses them alternately; \"circular\" keeps the "
        "newest minibatch_buffer_size train batches and samples from them.")
    replay_proportion: float = option(
        0.0, low=0.0, help="Number of old rollouts for each new rollout in train batches.")
    replay_slots: int = option(
        0, low=0, help="Number of the newest rollouts that are kept, to be used again according to replay_proportion.")
    max_policy_lag: int | None = option(
        None, low=0, help="Largest age, in updates, of the weights with which a rollout was collected, when an "
        "asynchronous learner first uses the rollout; at later uses, the limit applies to the whole train batch. "
        "None: only queue_size limits the lag.")
    on_policy_lag: str | None = option(
        None, choices=(*LAG_POLICIES, None), help="Treatment of rollouts that exceed max_policy_lag: \"drop\" drops "
        "them; \"wait\" also delays requests for rollouts that would be too old at their first use. None: \"wait\" if "
        "max_policy_lag is given and nothing contradicts it, otherwise \"drop\".")

    @property
    def delays_by_lag(self) -> bool:
        """Whether requests for rollouts that would exceed `max_policy_lag` are delayed."""
        if self.on_policy_lag is None:
            return self.max_policy_lag is not None and self.buffer != "circular"
        return self.on_policy_lag == "wait"

    @property
    def delays_requests(self) -> bool:
        """Whether requests for rollouts are delayed, by `queue_size` or by `max_policy_lag`."""
        return self.delays_by_lag or (self.queue_policy == "block" and self.buffer != "circular")

    def contradictions(self) -> Iterator[Problem]:
        """Refuse options that contradict each other."""
        yield from super().contradictions()
        if (self.replay_proportion > 0) != bool(self.replay_slots):
            yield Problem(
                f"replay_proportion={self.replay_proportion} and replay_slots={self.replay_slots!r} go together",
                "give both or none", ("replay_proportion", "replay_slots"))
        if self.ramp is not None and self.buffer == "circular":
            yield Problem(f"ramp={self.ramp} is for buffer='ring', and has no effect with buffer='circular'",
                          "leave ramp out", ("ramp", "buffer"))
        if self.on_policy_lag is not None and self.max_policy_lag is None:
            yield Problem(f"on_policy_lag={self.on_policy_lag!r} needs max_policy_lag, got None",
                          "give max_policy_lag, or leave on_policy_lag out", ("on_policy_lag", "max_policy_lag"))
        if self.on_policy_lag == "wait" and self.buffer == "circular":
            yield Problem("on_policy_lag='wait' counts future uses, which buffer='circular' draws at random",
                          "give on_policy_lag='drop'", ("on_policy_lag", "buffer"))


@dataclass(frozen=True, kw_only=True)
class CollectionPattern(Options):
    """The option that, together with `num_replay_workers`, selects the kind of collection."""

    col_communication: Communication = option(
        SYNC, help="Coordination of collection and learning: with \"synchronous\", they alternate; with "
        "\"asynchronous\", they run at the same time.")


def check_dataset(value: str | os.PathLike[str]) -> str:
    """Return the absolute path of a file or directory with data sets; return the id of a data set of Minari itself.

    Raises:
        ConfigError: The name is empty, or has another suffix than that of data sets.
    """
    name = os.path.expanduser(os.fspath(value))
    if not isinstance(name, str) or not name:
        raise ConfigError(f"dataset must be a file *{SUFFIX}, a directory of such files, or the id of a data set of "
                          f"Minari, got {value!r}")
    return os.path.abspath(name) if is_file(name) or os.path.isdir(name) else name


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(Options):
    """The option that replaces collection by a data set."""

    dataset: str | os.PathLike[str] | None = option(
        None, check=check_dataset, help="Data set from which the agent learns instead of collecting steps: a file "
        "*.npz, a directory of such files, or the id of a data set of Minari. All numbers of steps, such as "
        "target_steps, then count updates.")


# Options of `SynchronousCollection` that also have an effect on batches from a data set.
_WITH_DATASET = ("dataset", "check_data", "keep_bad_batches")


@dataclass(frozen=True, kw_only=True)
class SynchronousCollection(
        CWorkerOptions, CollectorOptions, BarrierOptions, MicrobatchCollectionOptions, GWorkerOptions, DatasetOptions,
        Kind):
    """Collection that alternates with learning; all collection workers act with the weights of the latest update."""

    chosen: ClassVar[tuple[str, ...]] = ("with col_communication='synchronous'", "without num_replay_workers")

    @property
    def collects_microbatches(self) -> bool:
        """Whether a train batch is collected in microbatches."""
        return None not in (self.train_batch_size, self.microbatch_size)

    def contradictions(self) -> Iterator[Problem]:
        """Refuse options that contradict each other or have no effect."""
        yield from super().contradictions()
        of_number = CENTRAL if self.num_workers == 1 else PARALLEL
        idle = () if self.dataset is None else [
            name for name in self.changed() if name not in _WITH_DATASET and getattr(self, name) is not of_number]
        if idle:
            yield Problem(f"{', '.join(idle)} would have no effect, because nothing is collected if there is a dataset",
                          f"leave out {', '.join(idle)}, or dataset", ("dataset", *idle))
        if self.infers_centrally:
            yield Problem(
                "inference='central': only with col_communication='asynchronous'", "give that, or backend='async' of "
                "the environments, with which one worker acts for environments in several processes",
                ("inference", *_CHOICES))
        yield from _problems_of_sizes(self.train_batch_size, self.microbatch_size)
        if not self.collects_microbatches:
            for name in ("prefetch", "norm_over"):
                if name in self.changed():
                    yield Problem(
                        f"{name}={getattr(self, name)!r}: only in microbatches, with train_batch_size and "
                        "microbatch_size", f"give both, or leave {name} out",
                        (name, "train_batch_size", "microbatch_size"))
        elif self.prefetch == 1 and self.col_fraction_workers < 1.0:
            yield Problem(
                "prefetch=1 contradicts col_fraction_workers < 1: slow workers are not preempted while a gradient is "
                "computed", "leave one of them out", ("prefetch", "col_fraction_workers"))


@dataclass(frozen=True, kw_only=True)
class AsynchronousCollection(
        CWorkerOptions, CollectorOptions, OnArrivalOptions, SampleQueueOptions, MicrobatchOptions, GWorkerOptions,
        Kind):
    """Collection that runs during learning; it pauses only if `queue_size` or `max_policy_lag` requires a wait."""

    chosen: ClassVar[tuple[str, ...]] = ("with col_communication='asynchronous'", "without num_replay_workers")

    @property
    def delays_by_lag(self) -> bool:
        """Whether requests for rollouts that would exceed `max_policy_lag` are delayed."""
        if self.on_policy_lag is None and (self.infers_centrally or self._has_old_weights):
            return False
        return super().delays_by_lag

    @property
    def _has_old_weights(self) -> bool:
        """Whether rollouts may be collected with other weights than the newest ones."""
        return (self.broadcast_interval, self.max_weight_sync_delay) != (1, None)

    def contradictions(self) -> Iterator[Problem]:
        """Refuse options that contradict each other."""
        yield from super().contradictions()
        yield from _problems_of_inference(self)
        yield from _problems_of_sizes(self.train_batch_size, self.microbatch_size)
        if self.on_policy_lag == "wait" and self.infers_centrally:
            yield Problem(
                "on_policy_lag='wait' contradicts inference='central', whose weights change within a rollout",
                "give on_policy_lag='drop'", ("on_policy_lag", "inference"))
        if self.on_policy_lag == "wait" and self._has_old_weights:
            yield Problem(
                "on_policy_lag='wait' requires that every rollout is collected with the newest weights",
                "leave out broadcast_interval and max_weight_sync_delay",
                ("on_policy_lag", "broadcast_interval", "max_weight_sync_delay"))

    @property
    def longest_interval(self) -> int:
        """Number of updates between new weights for a worker: min(`broadcast_interval`, `max_policy_lag` + 1).

        With a larger number, the weights of all workers could become older than `max_policy_lag` before new weights are
        due. All rollouts would be dropped, no update could be made, and the learner would wait forever.
        """
        limit = self.max_policy_lag
        return self.broadcast_interval if limit is None else min(self.broadcast_interval, limit + 1)


@dataclass(frozen=True, kw_only=True)
class ReplayCollection(
        ReplayCWorkerOptions, CollectorOptions, OnArrivalOptions, RWorkerSetOptions, GWorkerOptions, Kind):
    """Collection into replay shards, from which the learner samples its batches."""

    chosen: ClassVar[tuple[str, ...]] = ("with col_communication='asynchronous'", "with num_replay_workers")
    instead: ClassVar[Mapping[str, str]] = {"learning_starts": "; give start_steps of the algorithm instead"}

    def contradictions(self) -> Iterator[Problem]:
        """Refuse options that contradict each other."""
        yield from super().contradictions()
        yield from _problems_of_inference(self)


Collection: TypeAlias = SynchronousCollection | AsynchronousCollection | ReplayCollection
COLLECTION_KINDS = (SynchronousCollection, AsynchronousCollection, ReplayCollection)


def _problems_of_inference(collection: AsynchronousCollection | ReplayCollection) -> Iterator[Problem]:
    if collection.infers_centrally and "col_in_flight" in collection.changed():
        yield Problem(f"col_in_flight={collection.col_in_flight} is for inference='worker': with central inference, "
                      "each worker has one request, a step, at a time", "leave it out", ("col_in_flight", "inference"))


def _problems_of_sizes(train_batch_size: int | None, microbatch_size: int | None) -> Iterator[Problem]:
    if train_batch_size is not None and microbatch_size is not None and microbatch_size > train_batch_size:
        yield Problem(f"microbatch_size must not exceed train_batch_size, got {microbatch_size} > {train_batch_size}",
                      "lower microbatch_size", ("microbatch_size", "train_batch_size"))
