"""A set of gradient workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.options import option
from pytorchrl.runtime import DEFAULT_RESOURCES, Runtime, ThreadRuntime
from pytorchrl.scheme.base.worker import ASYNC, Communication, Execution, check_count, check_fraction
from pytorchrl.scheme.base.worker_set import WorkerSet
from pytorchrl.scheme.collection.collector_thread import CollectorThread
from pytorchrl.scheme.collection.strategies import Barrier, OnArrival
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.gradients.microbatch import GradAccumulator
from pytorchrl.scheme.gradients.sample_queue import SampleQueue
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.encoder import GRADS, Compression, Wanted
from pytorchrl.tracebacks import brief_errors


class GWorkerSet(WorkerSet[GWorker]):
    """The GWorkers of the update worker. With remote ones, the local one only serves and updates parameters.

    Args:
        num_workers: Number of remote workers; 1 means none.
        index_parent: Index of the parent worker.
        local_device: Where the local worker computes; see `check_device`.
        col_execution: "Central" or "Parallel" collection.
        col_communication: "synchronous" or "asynchronous" collection.
        col_workers_factory: Makes each GWorker's set of collection workers.
        col_fraction_workers: Share of collection workers that ends a synchronous round.
        grad_worker_resources: What each remote worker asks for.
        compress_grads_to_send: What becomes of gradients on their way; see `Scheme`.
        runtime: Where remote workers run.
        num_threads: Torch threads of each remote worker.
        grad_device: Where remote workers compute; None: as the local one.
        worker_options: Further options of `GWorker`: `fraction_samples`, `col_in_flight`, `queue_size`, ...

    Attributes:
        worker_class, remote_config, worker_params, num_workers: See `WorkerSet`.
    """

    kind = "gradient workers"

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of the gradient workers."""

        num_grad_workers: int = option(
            1, low=1, help="Gradient workers; 1 computes in the update worker's process, 2 or more are remote.")
        grad_worker_resources: Mapping[str, float] = option(
            default_factory=lambda: dict(DEFAULT_RESOURCES),
            help="Ray resources of each remote gradient worker. The default includes a share of a GPU only for workers "
            "that "
            "compute on one, and shrinks to what is available.")
        grad_device: str | None = option(
            None, help="Device of remote gradient workers: \"cpu\", \"cuda\" (the GPU that Ray assigned to the worker) "
            "or \"cuda:N\"; "
            "None: \"cuda\" if device is a GPU and the workers run on Ray, else device.")
        compress_grads_to_send: bool | str = option(
            False, help="Codec of gradients: False, True (\"lz4\"), \"lz4\", \"zstd\", the lossy \"fp16\", \"bf16\", "
            "\"int8\" and "
            "\"topk\", \"auto\" (bf16 while that saves time) or \"auto:<name>\".")

        def __post_init__(self) -> None:
            """Refuse codecs that are unknown or not installed."""
            super().__post_init__()
            Compression.of(GRADS, self.compress_grads_to_send)

    def __init__(self, num_workers: int, index_parent: int, local_device: str | None,  # noqa: PLR0913
                 col_execution: Execution | str, col_communication: Communication | str,
                 col_workers_factory: Callable[..., Any], col_fraction_workers: float,
                 grad_worker_resources: Mapping[str, float], compress_grads_to_send: Wanted = False, *,
                 runtime: Runtime | None = None, num_threads: int | None = 1, grad_device: str | None = None,
                 worker_options: Mapping[str, Any] | None = None) -> None:
        check_count("num_workers", num_workers)
        check_fraction("col_fraction_workers", col_fraction_workers)
        compression = Compression.of(GRADS, compress_grads_to_send)
        self.index_parent = index_parent
        num_remote = num_workers if num_workers > 1 else 0
        runtime = runtime or ThreadRuntime()
        params = {
            "col_workers_factory": col_workers_factory, "col_communication": Communication(col_communication),
            "compress_grads_to_send": False if compression is None else compression,
            "col_execution": Execution(col_execution),
            "col_fraction_workers": col_fraction_workers, "runtime": runtime, **_from_keywords(
                Communication(col_communication), col_fraction_workers, dict(worker_options or {})),
        }
        super().__init__(
            GWorker, params, grad_worker_resources, num_remote, runtime=runtime, name="GWorker ",
            local_params={"device": local_device, "collects": not num_remote},
            remote_params={"device": local_device if grad_device is None else grad_device, "num_threads": num_threads})

    @classmethod
    @brief_errors
    def create_factory(cls, num_workers: int, col_workers_factory: Callable[..., Any],  # noqa: PLR0913
                       col_fraction_workers: float = 1.0, col_execution: Execution | str = "Central",
                       col_communication: Communication | str = "synchronous", compress_grads_to_send: Wanted = False,
                       grad_worker_resources: Mapping[str, float] = DEFAULT_RESOURCES, *,
                       num_threads: int | None = 1, grad_device: str | None = None,
                       **worker_options: Any) -> Callable[..., GWorkerSet]:
        """A function that makes new GWorkerSets.

        Args:
            num_workers: Number of remote workers in the set; 1 means none.
            col_workers_factory: Makes each GWorker's set of collection workers.
            col_fraction_workers: Share of collection workers that ends a synchronous round.
            col_execution: "Central" or "Parallel" collection.
            col_communication: "synchronous" or "asynchronous" collection.
            compress_grads_to_send: What becomes of gradients on their way; see `Scheme`.
            grad_worker_resources: What each remote worker asks for; the default shrinks to what there is.
            num_threads: Torch threads of each remote worker.
            grad_device: Where remote workers compute; None: as the local one.
            worker_options: Further options of `GWorker`.

        Returns:
            A function of `(local_device, index_parent, runtime)`.
        """
        check_count("num_workers", num_workers)
        return partial(
            cls, num_workers, col_execution=Execution(col_execution),
            col_communication=Communication(col_communication), col_workers_factory=col_workers_factory,
            col_fraction_workers=check_fraction("col_fraction_workers", col_fraction_workers),
            grad_worker_resources=grad_worker_resources, compress_grads_to_send=compress_grads_to_send,
            num_threads=num_threads, grad_device=grad_device, worker_options=worker_options)


@dataclass(frozen=True, kw_only=True)
class _Rounds(CollectorThread.Options, Barrier.Options, GWorker.Options, GradAccumulator.CollectOptions):
    """Options of synchronous collection."""


@dataclass(frozen=True, kw_only=True)
class _Stream(CollectorThread.Options, OnArrival.Options, SampleQueue.Options, GWorker.Options,
              GradAccumulator.Options):
    """Options of asynchronous collection."""


@dataclass(frozen=True, kw_only=True)
class _Replay(CollectorThread.Options, OnArrival.Options, RWorkerSet.Options, GWorker.Options):
    """Options of asynchronous collection with replay shards."""


def _from_keywords(communication: Communication, fraction_workers: float, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `GWorker` for flat keywords; each kind of collection takes those that it has."""
    replay = dict(given.pop("replay_options", None) or {})
    if shards := replay.pop("options", None):
        replay |= {name: getattr(shards, name) for name in RWorkerSet.Options.__dataclass_fields__}
    given |= replay
    kind: type[BaseOptions] = _Stream if communication is ASYNC else _Rounds
    if "replay_workers_factory" in given:
        kind = _Replay
        given["train_batch_size"] = given.pop("batch_size", None)
    if kind is _Rounds:
        given["col_fraction_workers"] = fraction_workers
    elif kind is _Replay:
        given.pop("num_passes", None)
    names = set(kind.__dataclass_fields__)
    supervision = Supervisor.Options(**{name: given[name]
                                        for name in Supervisor.Options.__dataclass_fields__ if name in given})
    return {"collection": kind(**{name: value for name, value in given.items() if name in names}),
            "supervision": supervision,
            **{name: given[name] for name in ("compress_weights_to_send", "replay_workers_factory") if name in given}}
