"""The update worker, which is the root of the tree, and the thread that makes updates in the background."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn, TypeAlias

from pytorchrl.agent.schedules import Schedule
from pytorchrl.errors import CheckpointError, ConfigError, PyTorchRLError, ReplayError, StoppedError, WorkerLostError
from pytorchrl.files.atomic import saved_int
from pytorchrl.runtime import Runtime, ThreadRuntime
from pytorchrl.scheme.base.pause_point import PausePoint
from pytorchrl.scheme.base.worker import Worker
from pytorchrl.scheme.gradients.dataset_source import dataset_of
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.gradients.g_worker_set import GWorkerSetFactory
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.options.base import DEFAULT_EXECUTION, Execution
from pytorchrl.scheme.options.collection import SynchronousCollection
from pytorchrl.scheme.options.settings import gradients_of
from pytorchrl.scheme.options.updates import AsynchronousGradients, DecentralizedGradients, GradientKind, UWorkerOptions
from pytorchrl.scheme.recording.record import DRIVER, RecordWriter, RunRecord, checksum_of
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.encoder import WEIGHTS, Compression
from pytorchrl.scheme.transport.messages import Weights, WholeState
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S
from pytorchrl.scheme.updates.asynchronous import AsynchronousUpdates
from pytorchrl.scheme.updates.central import CentralUpdates
from pytorchrl.scheme.updates.decentralized import DecentralizedUpdates
from pytorchrl.scheme.updates.remote import Collaborators
from pytorchrl.scheme.updates.statistics import Statistics
from pytorchrl.scheme.updates.strategy import UpdateStrategy
from pytorchrl.scheme.updates.synchronous import SynchronousUpdates
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.threads import State, Stoppable, WorkThread
from pytorchrl.support.tracebacks import as_error, raise_exit
from pytorchrl.support.untyped import OptionValue, StateDict

# Seconds that stop() waits for running calls before it kills their workers.
_STOP_TIMEOUT_S = 4.0
# Seconds between two checks of an updater thread that makes no updates whether it should make updates again.
_IDLE_INTERVAL_S = 0.01

logger = get_logger(__name__)


class UpdaterThread(WorkThread):
    """Thread that makes updates until it is stopped.

    If the thread is not started, `step()` makes an update in the calling thread.

    Args:
        strategy: The strategy that turns gradients into updates.
        runtime: The runtime, which creates the event that stops the thread and the event that reports its updates.
    """

    def __init__(self, strategy: UpdateStrategy, runtime: Runtime) -> None:
        super().__init__(name="UpdaterThread", daemon=True)
        self._strategy, self._runtime = strategy, runtime
        self._closing = runtime.make_event()
        self.pause_point = PausePoint(runtime)
        # The updater sets this event after every update and when it ends; the thread that waits for updates clears it.
        self.progressed = runtime.make_event()
        self.failure: BaseException | None = None
        self.before_step: Callable[[], None] = lambda: None
        self.after_step: Callable[[], None] = lambda: None
        self.is_over: Callable[[], bool] = lambda: False
        self.is_unwanted: Callable[[], bool] = lambda: False

    @property
    def stopped(self) -> bool:
        """Whether the thread was signaled to stop."""
        return self._closing.is_set()

    @property
    def state(self) -> State:
        """NEW before the thread is started, STOPPED after the signal to stop, FAILED after an error."""
        if self.failure is not None:
            return State.FAILED
        if self.stopped:
            return State.STOPPED
        return State.NEW if self.ident is None else State.RUNNING

    def check(self) -> None:
        """Raise the error of the last update if it failed, because that update is incomplete."""
        if self.failure is not None:
            raise self.failure

    def step(self) -> None:
        """Make one update. After a failure, every call raises the same error, because the last update is incomplete."""
        self.check()
        try:
            self.before_step()
            self._strategy.step()
            self.after_step()
        except BaseException as failure:
            self.failure = as_error(failure, "the update worker")
            raise_exit(failure, "the update worker")
            raise

    def run(self) -> None:
        """Make updates until stopped. An exception ends the thread; the user's next call of `step` raises it."""
        try:
            while not self.stopped and not self.is_over():
                self.pause_point.pause_if_requested(lambda: self.stopped)
                if self._strategy.is_used_up or self.is_unwanted():  # until a drain, a call of step() or the end
                    self._runtime.sleep(_IDLE_INTERVAL_S)
                elif not self.stopped:
                    self.step()
                self.progressed.set()
        except BaseException:
            logger.debug("the updater thread ends", exc_info=True)
        self.progressed.set()

    def interrupt(self) -> None:
        """Let the thread make no further update."""
        self._closing.set()


def _check_target(factory: GWorkerSetFactory, target_steps: int | None) -> None:
    """Raise `ConfigError` if the algorithm has a schedule but `target_steps`, the end of schedules, is None."""
    options = factory.col_workers_factory.algo_factory.options
    scheduled = [name for name in options.changed() if isinstance(getattr(options, name), Schedule)]
    if scheduled and target_steps is None:
        raise ConfigError(f"{', '.join(scheduled)} follows a schedule, which ends with the run; set target_steps to "
                          "the number of env steps of the run")


class UWorker(Worker, Stoppable):
    """The update worker, which applies gradients, sends new weights to the other workers, and keeps statistics.

    Args:
        grad_workers_factory: Factory of the gradient workers.
        index_worker: Index of the worker; a tree has only one update worker.
        grad_execution: "Central" if the local gradient worker computes gradients, "Parallel" if the remote ones do.
        options: Options of the update worker; None: the defaults.
        gradients: Options of gradient workers; the options' class selects the strategy. None: synchronous gradients.
        device: Device of the local gradient worker: "cpu" or "cuda:N"; None: the CPU.
        runtime: Runtime of the remote workers; None: threads.
        target_steps: Env steps after which the experiment and all schedules end; required if there is a schedule.
        record: Writer of the file in which the run is recorded; None: the run is not recorded.
        replay: Record of the run that is replayed; None: no replay.

    Attributes:
        strategy: The strategy that turns gradients into updates.
        grad_workers: The set of gradient workers.
        local_worker, remote_workers: Members of the set of gradient workers.
        updater: The thread that makes updates.
        statistics: Ledger, lags, episodes and further statistics.
    """

    Options: TypeAlias = UWorkerOptions

    def __init__(self, grad_workers_factory: GWorkerSetFactory, index_worker: int = 0, *,  # noqa: PLR0913
                 grad_execution: Execution | str = DEFAULT_EXECUTION, options: Options | None = None,
                 gradients: GradientKind | None = None, device: str | None = None, runtime: Runtime | None = None,
                 target_steps: int | None = None, record: RecordWriter | None = None,
                 replay: RunRecord | None = None) -> None:
        super().__init__(index_worker)
        if gradients is None:
            gradients = gradients_of({"grad_execution": grad_execution}, grad_workers_factory.options)
        _check_target(grad_workers_factory, target_steps)
        self._runtime, options = runtime or ThreadRuntime(), options or UWorker.Options()
        collection, supervision = grad_workers_factory.collection, grad_workers_factory.supervision
        factory = replace(
            grad_workers_factory, options=gradients, compress_weights_to_send=options.compress_weights_to_send)
        self.grad_workers = factory(index_worker, device, self._runtime)
        self.local_worker: GWorker = self.grad_workers.local_worker()
        self.remote_workers = self.grad_workers.remote_workers()
        self.statistics = Statistics(self._runtime.now)
        self._target_steps, self._dataset = target_steps or 1, dataset_of(collection)
        self._journal = self._runtime.journal(DRIVER)
        self._record, self._replay = record, replay
        # `_is_awaited` and `_is_finishing`: whether calls of `step` and of `use_up` wait for updates of the thread.
        self._updates_per_step, self._is_awaited, self._is_finishing = options.updates_per_step, False, False
        self._update_began = 0.0
        self._in_thread = isinstance(gradients, AsynchronousGradients) and not gradients.is_parallel
        self.strategy: UpdateStrategy
        if not gradients.is_parallel:
            self.strategy = CentralUpdates(self.local_worker, self.statistics, in_thread=self._in_thread)
        else:
            request_timeout_s = 2 * collection.queue_timeout_s
            is_decentralized = isinstance(gradients, DecentralizedGradients)
            # A record does not contain the exact time at which a group of decentralized workers breaks up, so a replay
            # could not reproduce the breakup. Therefore, a lost worker ends a recorded run.
            if is_decentralized and self._journal.is_kept:
                supervision = replace(supervision, on_worker_failure="raise")
            supervisor = Supervisor(
                self.remote_workers, self.grad_workers.replace, self._runtime, supervision,
                hang_timeout_s=request_timeout_s)
            tree = Collaborators(
                local_worker=self.local_worker, workers=self.remote_workers, runtime=self._runtime,
                statistics=self.statistics, supervisor=supervisor, journal=self._journal,
                request_timeout_s=request_timeout_s,
                compress_weights=None if is_decentralized else Compression.of(
                    WEIGHTS, options.compress_weights_to_send))
            if isinstance(gradients, AsynchronousGradients):
                self.strategy = AsynchronousUpdates(tree, gradients)
            elif is_decentralized:
                fraction_workers = 1.0
                if isinstance(collection, SynchronousCollection) and not collection.is_parallel:
                    fraction_workers = collection.col_fraction_workers
                self.strategy = DecentralizedUpdates(tree, fraction_workers)
            else:
                self.strategy = SynchronousUpdates(tree)
        self.updater = UpdaterThread(self.strategy, self._runtime)
        self.updater.before_step, self.updater.after_step = self._before_update, self._after_update
        self.updater.is_over, self.updater.is_unwanted = lambda: self._replay_is_over, self._has_reached_target
        self._final: LedgerSnapshot | None = None

    def ready(self) -> int:
        """Wait until every worker of the tree is built; return the index of the local gradient worker."""
        self.grad_workers.wait_ready()
        return self.local_worker.ready()

    @property
    def clock(self) -> int:
        """Number of env steps that have reached the learner or, with a data set, of updates; schedules follow it."""
        return self.statistics.tree_ledger.env_steps if self._dataset is None else self.statistics.updates

    @property
    def num_rounds(self) -> int:
        """Number of updates made or skipped."""
        return self.statistics.updates + self.statistics.counters.updates_skipped_nan

    @property
    def _replay_is_over(self) -> bool:
        return self._replay is not None and self._replay.is_over(self.num_rounds)

    def _has_reached_target(self) -> bool:
        """Return whether the experiment is over, so that the thread makes an update only if `step` waits for it.

        The statistics at the end of a run then belong to the weights at its end.
        """
        is_awaited = self._is_finishing or (
            self._is_awaited and self.statistics.new_updates < self._updates_per_step)
        return (not is_awaited and self._replay is None and 1 < self._target_steps
                <= self.clock)

    def _raise_end_of_record(self) -> NoReturn:
        assert self._replay is not None
        raise ReplayError(f"the record {self._replay.path!r} ends after {self._replay.updates} updates")

    def _before_update(self) -> None:
        if self._replay_is_over:
            self._raise_end_of_record()
        self._update_began = self._runtime.now()
        self.local_worker.follow_schedules(lambda: self.clock, self._target_steps)

    def _after_update(self) -> None:
        self.statistics.add_step_s(self._runtime.now() - self._update_began)
        if self._journal.is_kept:
            self._journal.note("update", self.num_rounds, checksum_of(self.statistics.last_info))
        if self._record is not None and self._record.is_due:
            self._write_record()
        if self._replay is not None:
            self._compare_end(self._replay)

    def _compare_end(self, replay: RunRecord) -> None:
        """Raise `ReplayError` if the replay ends differently from its record, or continues beyond a recorded error."""
        if replay.failed and self.num_rounds > replay.updates:
            raise ReplayError(
                f"the error that ended the run of {replay.path!r} after {replay.updates} updates did not occur again; "
                "it may have depended on time or on the machine")
        if self._replay_is_over and replay.checksum is not None:
            self._pull_weights()
            if self._checksum() != replay.checksum:
                raise ReplayError(f"the replayed run ends with other parameters than the run in {replay.path!r}")

    def _checksum(self) -> int:
        """Return a checksum of the exact values of all parameters and normalizers."""
        return self.local_worker.get_weights().checksum

    def _write_record(self, failure: BaseException | None = None) -> None:
        # The events in a remote worker's journal arrive with a gradient or, if the call failed, in `failure.part`.
        own = self._journal.take()
        assert self._record is not None
        assert own is not None
        parts = [*self.statistics.take_journal_parts(), getattr(failure, "part", None), self.local_worker.take_part(),
                 (DRIVER, 0, own)]
        self._record.add(part for part in parts if part is not None)

    def step(self) -> dict[str, float]:
        """Make `updates_per_step` updates, or wait until a separate thread has made this number since the last call.

        Returns:
            The means of the algorithm's statistics over the updates since the last call. An update is skipped if its
            loss or gradient is not finite; such an update has no statistics. If no separate thread makes the updates, a
            skipped update counts as one of `updates_per_step`.

        Raises:
            StoppedError: `stop()` was called earlier.
            NonFiniteUpdateError: More than five updates in a row were skipped.
            Exception: The error that ended a worker or thread.
        """
        if self._final is not None:
            raise StoppedError("this scheme has been stopped; build a new one")
        if self._in_thread:
            return self._await_updates()
        for number in range(self._updates_per_step):
            if number and self._replay_is_over:  # the record ends within a step
                break
            self.updater.step()
        self.strategy.send_requests()
        return self.statistics.take_info()[1]

    def drain(self, timeout_s: float) -> None:
        """Finish or drop all work in the tree; see `Scheme.drain`.

        Raises:
            ConfigError: The run is recorded or replayed, so the tree cannot be drained.
            WorkerLostError: The update that a thread is making did not end within `timeout_s` seconds.
            Exception: The error that ended a worker or thread.
        """
        if self._journal.is_kept:
            raise ConfigError("a run that is recorded or replayed cannot be drained; leave record and replay out")
        self.updater.check()
        start = self._runtime.now()
        if self.updater.state is State.RUNNING:
            self.strategy.prepare_drain()
            if not self.updater.pause_point.request(self.updater.is_alive, timeout_s):
                raise WorkerLostError(f"the running update did not end within {timeout_s:.1f} s")
            self.updater.check()
        self.strategy.drain(max(0.0, timeout_s - (self._runtime.now() - start)))

    def use_up(self, timeout_s: float) -> None:
        """Collect no more data, and make updates until all collected data are used, at most for `timeout_s` seconds.

        With several gradient workers, and in synchronous collection or with shards, this method does nothing.

        Raises:
            Exception: The error that ended a worker or thread.
        """
        self.updater.check()
        deadline = self._runtime.now() + timeout_s
        if not self.strategy.finish_collection():
            return
        self._is_finishing = True
        try:
            while not self.strategy.is_used_up and self._runtime.now() < deadline:
                if self.updater.state is not State.RUNNING:
                    self.updater.step()
                    continue
                self.updater.progressed.wait(POLL_INTERVAL_S)
                self.updater.progressed.clear()
                self.updater.check()
        finally:
            self._is_finishing = False

    def resize(self, num_col_workers: int | tuple[int, ...], resources: Mapping[str, float] | None = None) -> None:
        """Change the number of collection workers of each gradient worker; see `Scheme.resize`.

        Args:
            num_col_workers: New number, or a tuple with one number for each gradient worker.
            resources: Resources of each new worker; None: those of the earlier workers.

        Raises:
            Exception: The error that ended a worker or thread.
        """
        self.updater.check()
        self.grad_workers.plan_resize(num_col_workers, resources)
        self.strategy.resize(num_col_workers, resources)

    @property
    def is_between_train_batches(self) -> bool:
        """Whether all train batches are used up, so that the next step takes new ones; see `UpdateStrategy`."""
        return self.strategy.is_between_train_batches

    def checkpoint(self, seed: int | None, timeout_s: float, *, uses_queued: bool = True) -> StateDict:
        """Return the state of the tree as plain values and tensors, and reseed the tree.

        Args:
            seed: Seed for the continuation of this run, and for the run that restores the state. None: this run ends,
                so the tree is not reseeded.
            timeout_s: Seconds after which workers that are not drained are considered lost.
            uses_queued: Whether to make updates from the data that have been collected, for at most half of
                `timeout_s`, before the tree is drained.
        """
        start = self._runtime.now()
        if uses_queued and not self._journal.is_kept:
            self.use_up(timeout_s / 2)
        self.drain(timeout_s - (self._runtime.now() - start))
        whole, workers = self.strategy.state()
        # Read the ledger immediately after the states: a worker that is lost in between would make the two differ.
        statistics = self.statistics.state()
        if seed is not None:
            self.strategy.reseed(seed)
        return {"version": whole.version, "algorithm": whole.algorithm, "workers": workers, "accounts": statistics}

    def restore(self, state: StateDict, seed: int) -> None:
        """Restore a state that `checkpoint` of another tree returned; call this method before the first step.

        Args:
            state: The saved state.
            seed: The seed that was passed to `checkpoint`.

        Raises:
            CheckpointError: The state does not fit this tree.
        """
        try:
            workers = state["workers"]
            self.strategy.restore(WholeState(saved_int(state["version"]), state["algorithm"]), workers)
            self.strategy.reseed(seed)
            self.grad_workers.plan_seed(seed)
            self.statistics.restore(state["accounts"], {
                index: LedgerSnapshot.from_saved(**own["ledger"])
                for index, own in enumerate(workers, start=1 if self.remote_workers else 0) if own is not None})
        except (ConfigError, MemoryError) as error:
            raise CheckpointError(f"the checkpoint does not fit this agent: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, PyTorchRLError):
                raise
            raise CheckpointError(f"the checkpoint does not contain the state of this agent: {error!r}") from error

    def _await_updates(self) -> dict[str, float]:
        if self.updater.state is State.NEW:
            self._runtime.start_thread(self.updater)
        self.updater.pause_point.resume()
        self._is_awaited = True
        try:
            return self._updates_of_thread()
        finally:
            self._is_awaited = False

    def _updates_of_thread(self) -> dict[str, float]:
        """Wait for `updates_per_step` updates since the last call of `step`, and return their statistics."""
        was_over = self._replay_is_over
        while True:
            self.updater.progressed.wait(POLL_INTERVAL_S)
            self.updater.progressed.clear()
            if self.statistics.new_updates >= self._updates_per_step:
                return self.statistics.take_info()[1]
            if self._replay_is_over:
                if was_over and not self.statistics.new_updates:
                    self._raise_end_of_record()
                return self.statistics.take_info()[1]  # possibly fewer than `updates_per_step` updates
            self.updater.check()
            if not self.updater.is_alive():
                raise WorkerLostError("the updater thread ended without an error")

    @property
    def actor_version(self) -> int:
        """The number of updates made, which is the version of the parameters."""
        return self.statistics.updates

    def get_weights(self) -> Weights:
        """Return a snapshot of the parameters and normalizers that acting needs, and their version."""
        self._pull_weights()
        return self.local_worker.get_weights()

    def save_model(self, fname: str) -> str:
        """Save the current actor; see `GWorker.save_model`."""
        self._pull_weights()
        return self.local_worker.save_model(fname)

    def _pull_weights(self, timeout_s: float = _STOP_TIMEOUT_S * 5) -> None:
        if self._final is None:
            self.strategy.pull_weights(timeout_s)

    def update_algorithm_parameter(self, parameter_name: str, new_parameter_value: OptionValue) -> None:
        """Change a parameter of the algorithm in every worker; the value replaces any schedule of the parameter.

        Raises:
            ConfigError: The run is recorded or replayed, and a separate thread makes the updates. The record could not
                state between which two updates the parameter was changed.
        """
        if self._journal.is_kept:
            if self._in_thread:
                raise ConfigError(
                    f"{parameter_name} cannot be changed while a run with asynchronous central gradients is recorded "
                    "or replayed; use a schedule, or grad_communication='synchronous'")
            self._journal.note("parameter", parameter_name, repr(new_parameter_value))
        self.local_worker.update_algorithm_parameter(parameter_name, new_parameter_value)
        self.strategy.forget_weights()

    def stop(self) -> LedgerSnapshot:
        """Stop all threads and workers; return the final ledger, which has no steps in flight or queued.

        Repeated calls only return the ledger.
        """
        if self._final is not None:
            return self._final
        failure = self.updater.failure
        self.statistics.request_report()
        self.updater.interrupt()
        self.grad_workers.interrupt()
        self._runtime.join_thread(self.updater, _STOP_TIMEOUT_S)
        self.strategy.finish(_STOP_TIMEOUT_S)
        with contextlib.suppress(WorkerLostError):  # after this error, the local worker keeps its weights
            self._pull_weights(1.0)
        for index, ledger in enumerate(self.grad_workers.stop(_STOP_TIMEOUT_S)):
            self.statistics.tree_ledger.close(index, ledger)
        self._final = self.statistics.tree_ledger.settle()
        if self._record is not None:
            self._write_record(failure)
            has_failed = isinstance(failure, Exception) and not isinstance(failure, StoppedError)
            self._record.close(has_failed, None if failure is not None else self._checksum())
        return self._final
