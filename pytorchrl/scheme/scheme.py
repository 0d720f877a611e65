"""The scheme: an agent and the worker tree that trains it."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from pytorchrl.agent.algorithms.precision import choices_of
from pytorchrl.agent.data import Episode, Evaluation
from pytorchrl.agent.factories import Agent
from pytorchrl.agent.fit import provided_kind
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.option_values.text import items_of
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.agent.storages.goals import with_reward
from pytorchrl.agent.storages.groups import for_environments
from pytorchrl.errors import ConfigError, DeadlockError, ReplayError, StoppedError
from pytorchrl.files.tensors import MODEL_FORMAT, save
from pytorchrl.runtime import Runtime, SimulatedRuntime, make_runtime
from pytorchrl.scheme.architectures import Architectures
from pytorchrl.scheme.base.worker import check_timeout
from pytorchrl.scheme.check import check, warnings_of
from pytorchrl.scheme.choices import apply_choices, decide_choices
from pytorchrl.scheme.collection.c_worker_set import CWorkerSetFactory
from pytorchrl.scheme.elastic import CHECKPOINT_FORMAT, check_resume, resize
from pytorchrl.scheme.gradients.dataset_source import dataset_of
from pytorchrl.scheme.gradients.defaults import resolve_defaults
from pytorchrl.scheme.gradients.g_worker_set import GWorkerSetFactory
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.numerics import PROGRAM, Numerics
from pytorchrl.scheme.options.base import ASYNC
from pytorchrl.scheme.options.collection import AsynchronousCollection, Collection, ReplayCollection
from pytorchrl.scheme.options.keywords import SchemeKeywords, UpdateKeywords, refuse_other_levels
from pytorchrl.scheme.options.run import RuntimeKind
from pytorchrl.scheme.options.settings import (
    LEVELS,
    STORAGE_KEYWORDS,
    Settings,
    gradients_of,
    items_of_kinds,
    known_keywords,
    names_of_level,
)
from pytorchrl.scheme.options.updates import GradientKind, GradientPattern
from pytorchrl.scheme.recording.record import RecordWriter, describe, read_record
from pytorchrl.scheme.replay.r_worker_set import RWorkerSetFactory
from pytorchrl.scheme.replay.storage_options import options_in_settings, with_settings
from pytorchrl.scheme.supervision.evaluation import Evaluations
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.updates.u_worker import UWorker
from pytorchrl.support.display import Displayed, Row, table_text
from pytorchrl.support.signals import interrupt_as_usual, undivided
from pytorchrl.support.terminal import get_logger, printable
from pytorchrl.support.threads import Stoppable, in_turn
from pytorchrl.support.tracebacks import brief_errors_of, raise_exit
from pytorchrl.support.untyped import MetricsDict, OptionValue, StateDict

T = TypeVar("T")

logger = get_logger(__name__)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pytorchrl.agent.env import EnvFactory
    from pytorchrl.agent.factories import ActorFactory, AlgorithmFactory, StorageFactory


def _workers_of(agent: Agent, gradients: GradientKind, collection: Collection) -> GWorkerSetFactory:
    """Return the factory of an agent's gradient workers and of the workers below them."""
    storage = with_reward(agent.storage_factory, agent.train_envs_factory)
    shards = None
    if isinstance(collection, ReplayCollection):
        shards = RWorkerSetFactory(collection, agent.algo_factory, agent.actor_factory, storage)
    collectors = CWorkerSetFactory(
        collection, agent.algo_factory, agent.actor_factory, storage, agent.train_envs_factory)
    return GWorkerSetFactory(gradients, collection, collectors, shards)


def _evaluator_of(agent: Agent, seed: int, num_threads: int | None) -> dict[str, object]:
    """Return the arguments of an agent's `Evaluator`, which uses `num_threads` PyTorch threads."""
    parts = {name: part for name, part in agent.as_dict().items()
             if name in ("algo_factory", "actor_factory", "test_envs_factory")}
    return {"index_worker": 1, **parts, "seed": seed, "num_threads": num_threads}


def check_scheme(scheme: T) -> T:
    """Return `scheme`; raise `ConfigError` if it is not a scheme, for example if it is a factory."""
    if not hasattr(scheme, "settings"):
        raise ConfigError(f"scheme must be a Scheme, such as Scheme(algorithm, actor, storage, envs), got {scheme!r}")
    return scheme


@brief_errors_of("__init__", "from_factory", "start", "step", "resize", "drain", "checkpoint", "resume", "stop",
                 "update_algorithm_parameter", "save_model", "start_evaluation", "poll_evaluation", "wait_evaluation")
class Scheme(Architectures, Displayed, Stoppable):
    """An agent and the worker tree that trains it. The constructor checks all settings; `start` starts the workers.

    The settings can be given as flat keywords, as kinds (`collection`, `gradients`, `runtime`), or as nested factories
    (`from_factory`). A kind is a class of options, e.g. for asynchronous collection. All forms build the same tree. An
    option has the same name in every form; the documentation page "Options" shows its default, range and help text.
    The `repr` shows the settings that were given, and `print(scheme)` shows all settings.

    Args:
        algo_factory: Factory of the algorithm, e.g. `PPO.create_factory(...)`.
        actor_factory: Factory of the actor.
        storage_factory: Factory of the storage.
        train_envs_factory: Factory of each collection worker's environments.
        test_envs_factory: Factory of the evaluation's environments; None: no evaluation.
        collection: Kind of collection with its options; None: built from the flat keywords.
        gradients: Kind of gradients with their options; None: built from the flat keywords.
        runtime: "ray", "processes", "threads", "simulated" or a kind with its options; None: Ray if there are remote
            workers, else threads.
        supervision: Options for the handling of lost workers; None: built from the flat keywords.
        **settings: Flat keywords.

    Attributes:
        agent: The factories; the storage's factory includes the storage options that were given to the scheme.
        seed: The seed of the run.
        settings: Every setting by its flat name, as JSON-serializable values.
        nested: The settings, grouped by level of the scheme (collection, gradients, updates, ...).
        evaluations: The evaluations that run in parallel with training; None before the first evaluation.

    Raises:
        ConfigError: A setting is invalid, or settings contradict each other. The message lists all problems.
    """

    @checked_names
    def __init__(self, algo_factory: AlgorithmFactory, actor_factory: ActorFactory,  # noqa: PLR0913
                 storage_factory: StorageFactory, train_envs_factory: EnvFactory,
                 test_envs_factory: EnvFactory | None = None, *, collection: Collection | None = None,
                 gradients: GradientKind | None = None, runtime: RuntimeKind | str | None = None,
                 supervision: Supervisor.Options | None = None, **settings: Unpack[SchemeKeywords]) -> None:
        keywords: dict[str, object] = {**settings}
        kinds = {"collection": collection, "gradients": gradients, "runtime": runtime, "supervision": supervision}
        self._given = {**keywords}, kinds
        for_storage = {name: keywords.pop(name) for name in STORAGE_KEYWORDS if name in keywords}
        nested, problems = Settings.from_keywords(
            keywords, collection=collection, gradients=gradients, runtime=runtime, supervision=supervision)
        storage_factory = with_settings(storage_factory, for_storage, nested.collection, problems)
        storage_factory = for_environments(storage_factory, train_envs_factory)
        self.agent = Agent(algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory)
        problems.add(check(self.agent, nested))
        problems.raise_all()
        texts = warnings_of(self.agent, nested)
        collection, more = resolve_defaults(nested.collection, self.agent)
        self.nested = replace(nested, collection=collection)
        replay = self.nested.recording.replay
        self._replay = None if replay is None else read_record(replay)
        self._has_drawn_seed = self.nested.process.seed is None
        self.seed = self.nested.process.seed_or(None if self._replay is None else self._replay.settings["seed"])
        self.nested = replace(self.nested, process=self.nested.process.replaced(seed=self.seed))
        self.settings: dict[str, object] = self.nested.flat() | options_in_settings(for_storage, storage_factory)
        if self._replay is not None:
            self.agent = apply_choices(self.agent, self._replay.choices)
            self._replay.check(self.settings, self.agent.as_dict())
            more += filter(None, [self._replay.warning()])
        for text in [*texts, *more]:
            # Skip the frames of this constructor and its two decorators, so that the warning names the caller's line.
            warnings.warn(printable(text), stacklevel=4)
        self._runtime: Runtime | None = None
        self._worker: UWorker | None = None
        self.evaluations: Evaluations | None = None
        self._final: LedgerSnapshot | None = None
        self._finalizer: weakref.finalize[..., object] | None = None
        self._checkpoint: StateDict | None = None  # the checkpoint from which the run resumes
        self._num_checkpoints = 0

    @classmethod
    def known_keywords(cls) -> Mapping[str, tuple[str, str]]:
        """Return all keywords of `Scheme`, each mapped to ("scheme", keyword); error messages suggest similar ones."""
        return known_keywords()

    @classmethod
    def from_factory(cls, gradients: GWorkerSetFactory, test_envs_factory: EnvFactory | None = None, *,
                     runtime: RuntimeKind | str | None = None, **settings: Unpack[UpdateKeywords]) -> Scheme:
        """Build a scheme from the factory of its gradient workers.

        Args:
            gradients: Result of `GWorkerSet.create_factory`.
            test_envs_factory: Factory of the evaluation's environments; None: no evaluation.
            runtime: Runtime of the workers, as for `Scheme`.
            **settings: Settings of the update worker, the runtime, supervision, recording and the process.

        Raises:
            ConfigError: A setting is invalid, or settings contradict each other.
        """
        if not isinstance(gradients, GWorkerSetFactory):
            raise ConfigError(f"from_factory needs the result of GWorkerSet.create_factory(...), got {gradients!r}")
        refuse_other_levels("Scheme.from_factory", settings)
        keywords: dict[str, object] = {**settings}
        kind = gradients_of(keywords, gradients.options)
        chosen = {*kind.declarations(), *GradientPattern.declarations()}
        others: dict[str, OptionValue] = {name: value for name, value in keywords.items() if name not in chosen}
        col = gradients.col_workers_factory
        return cls(col.algo_factory, col.actor_factory, col.storage_factory, col.train_envs_factory, test_envs_factory,
                   collection=gradients.collection, gradients=kind, runtime=runtime, **others)

    def _rows(self) -> list[Row]:
        keywords, kinds = self._given
        return [*self.agent._rows(), ("settings", items_of(keywords) + items_of_kinds(kinds))]

    def __str__(self) -> str:
        """Return text with every setting, by level; `repr` shows only the settings that were given."""
        levels = {level: names_of_level(level) for level in LEVELS} | {"storage": [*STORAGE_KEYWORDS]}
        rows = [(level, [f"{name}={self.settings[name]!r}" for name in names]) for level, names in levels.items()]
        return table_text(type(self).__name__, [*self.agent._rows(), *rows])

    # Start and stop, steps and checkpoints

    @property
    def runtime(self) -> Runtime | None:
        """The runtime of the workers; None before `start` and after `stop`."""
        return self._runtime

    @property
    def has_remote_workers(self) -> bool:
        """Whether any worker runs outside this process."""
        return self.nested.has_remote_workers

    @in_turn("_turn")
    def start(self, target_steps: int = 1, announce: Callable[[str], None] | None = None) -> UWorker:
        """Build and start the worker tree. The first `step` calls this method if it was not called before.

        Args:
            target_steps: Number of env steps at which schedules, e.g. of the learning rate, end.
            announce: Function that is called with messages about progress.

        Raises:
            StartError: Resources are missing, Ray cannot be reached, or a worker did not start.
            StoppedError: The scheme has been stopped.
        """
        if self._final is not None:
            raise StoppedError("this scheme has been stopped; build a new one")
        if self._worker is None:
            PROGRAM.enter(self, self.nested.process)
            if self._replay is not None:
                self._replay.check_target(target_steps)
            self.agent = decide_choices(self.agent, self.nested, target_steps)
            path, agent = self.nested.recording.record, self.agent.as_dict()
            record = None if path is None else RecordWriter(str(path), self.settings, agent, target_steps)
            self._runtime = make_runtime(
                self.nested.used_runtime, seed=self.seed, is_recording=record is not None,
                replay=None if self._replay is None else self._replay.parts)
            self._runtime.announce = announce
            try:
                self._worker = self._build(self._runtime, target_steps, record)
                self._worker.ready()
                if self._checkpoint is not None:
                    self._num_checkpoints = self._checkpoint["part"]
                    self._worker.restore(self._checkpoint["state"], self._seed_after_checkpoint)
                    self._checkpoint = None
            except BaseException as failure:
                if record is not None:
                    record.discard()
                self.stop()
                raise_exit(failure, "the start of the workers")
                raise
            self._finalizer = stop_if_dropped(self, self.nested, self._worker, self._runtime)
        return self._worker

    def _build(self, runtime: Runtime, target_steps: int, record: RecordWriter | None) -> UWorker:
        nested = self.nested
        factory = replace(_workers_of(self.agent, nested.gradients, nested.collection), supervision=nested.supervision,
                          seed=self.seed, num_threads=nested.process.num_threads, numerics=Numerics.of(nested.process))
        return UWorker(
            factory, options=nested.updates, gradients=nested.gradients, device=nested.process.device,
            runtime=runtime, target_steps=target_steps, record=record, replay=self._replay)

    @property
    def replay_is_over(self) -> bool | None:
        """Whether the replayed run has reached its end; None if no run is replayed."""
        num_rounds = 0 if self._worker is None else self._worker.num_rounds
        return None if self._replay is None else self._replay.is_over(num_rounds)

    @property
    def update_worker(self) -> UWorker:
        """The root of the worker tree; if the tree has not been started, this property starts it."""
        return self._worker or self.start()

    @in_turn("_turn")
    def step(self) -> dict[str, float]:
        """Make `updates_per_step` updates.

        With asynchronous central gradients, a separate thread makes the updates. This method then waits until the
        thread has made `updates_per_step` updates since the last call.

        An update whose loss or gradient is not finite is skipped: the parameters do not change, and `metrics()` counts
        the update in `updates_skipped_nan`.

        After Ctrl-C, the call ends normally before `KeyboardInterrupt` is raised, so that no update is left incomplete.
        If the call takes two more seconds, or if Ctrl-C is pressed again, `KeyboardInterrupt` is raised at once.

        Returns:
            The algorithm's statistics, as means weighted by the number of samples; empty if all updates were skipped.

        Raises:
            NonFiniteUpdateError: More than five updates in a row were skipped.
            ReplayError: A replayed run deviates from its record, or continues beyond the end of the record.
            Exception: The error that ended a worker or thread.
        """
        try:
            return undivided((self._worker or self.start()).step)
        except DeadlockError as deadlock:
            if self._replay is None:
                raise
            text = f"the replayed run does not follow its record {self._replay.path!r}: {deadlock}"
            raise ReplayError(text) from deadlock

    @in_turn("_turn")
    def resize(self, *, num_col_workers: int | tuple[int, ...]) -> None:
        """Change the number of collection workers of each gradient worker, without stopping the run.

        If the number is reduced, the workers with the largest indices deliver all requested rollouts and are closed.
        New workers start like replacements of lost workers, with new seeds and the newest weights. No step is lost.

        Raises:
            ConfigError: The number is invalid, collection is central, or the run is recorded or replayed.
            InsufficientResourcesError: The machines lack resources that the new workers request.
            StoppedError: The scheme has been stopped.
        """
        if self._final is not None:
            raise StoppedError("this scheme has been stopped; its number of workers cannot change")
        self.nested = resize(self.nested, self.agent, num_col_workers, self._worker, self._runtime)
        self.settings["num_col_workers"] = self.nested.flat()["num_col_workers"]

    @in_turn("_turn")
    def drain(self, timeout_s: float = 60.0) -> MetricsDict:
        """Finish or discard all pending work, so that nothing is in flight or queued; `step()` resumes the run.

        No new work is requested. Rollouts that are being collected are finished. With replay shards, these rollouts are
        added to the shards, whose contents are kept. Gradients and data that no update has used are dropped and counted
        in `dropped["shutdown"]`. An update in progress is finished; no further update is made.

        Args:
            timeout_s: Seconds after which workers that have not answered are considered lost.

        Returns:
            The ledger.

        Raises:
            ConfigError: The timeout is not a positive number, or the run is recorded or replayed.
            StoppedError: The scheme was stopped.
            Exception: The error that ended a worker or thread.
        """
        check_timeout(timeout_s)
        if self._final is not None:
            raise StoppedError("this scheme has been stopped, so nothing is left to drain; ledger() returns its final "
                               "ledger")
        if self._worker is not None:
            self._worker.drain(timeout_s)
        return self.ledger()

    @in_turn("_turn")
    def checkpoint(self, timeout_s: float = 60.0, *, is_last: bool = False, uses_queued: bool = True) -> StateDict:
        """Return the whole state of the run, from which a scheme with the same settings can resume.

        With a single learner and asynchronous collection, the learner first uses the train batches that are queued or
        in flight, so they are not dropped. The tree is then drained. A checkpoint contains no state of environments,
        random generators or processes. Therefore, after a checkpoint, both this scheme and a scheme that resumes start
        new episodes, and use new seeds that derive from the experiment's seed and the number of checkpoints. With
        synchronous collection and gradients on a CPU, the scheme that resumes continues like this scheme, bit for bit.

        Args:
            timeout_s: Time limit in seconds; see `drain`.
            is_last: Whether this scheme does not continue. Its environments and random generators then stay as they
                are, which saves time, and it must be stopped.
            uses_queued: Whether the learner makes these updates, which take at most half of the time; if not, the train
                batches are dropped.

        Returns:
            Plain values and tensors of parameters, optimizers, target networks, normalizers, schedules, replay, the
            ledger, and the residuals of lossy gradient compression. All tensors are copies, so the checkpoint may be
            saved while the scheme continues.

        Raises:
            ConfigError: The run is recorded or replayed.
            StoppedError: The scheme was stopped.
            Exception: The error that ended a worker or thread.
        """
        check_timeout(timeout_s)
        if self._final is not None:
            raise StoppedError("this scheme has been stopped; make checkpoints before stop()")
        worker = self.update_worker
        self._num_checkpoints += 1
        state = worker.checkpoint(
            None if is_last else self._seed_after_checkpoint, timeout_s, uses_queued=uses_queued)
        return {"format": CHECKPOINT_FORMAT, "settings": dict(self.settings),
                "agent": describe(self.agent.as_dict()), "choices": choices_of(self.agent.algo_factory),
                "part": self._num_checkpoints, "state": state}

    def resume(self, checkpoint: StateDict) -> None:
        """Make `start` continue from the `checkpoint()` of a scheme with the same settings.

        If no seed was given to this scheme, it uses the seed of the checkpoint. Some settings may differ: runtime,
        placement, resources, devices, timeouts, `faults`, `on_worker_failure`, `num_col_workers` and the test
        environments.

        Raises:
            CheckpointError: The checkpoint is from another kind of agent or scheme. The message names all differences.
            ConfigError: This scheme was started, or records or replays a run.
        """
        if self._worker is not None or self._final is not None:
            raise ConfigError("only a scheme that has not been started can resume; build a new one")
        self.agent = check_resume(checkpoint, self.settings, self.agent, any_seed=self._has_drawn_seed)
        if self._has_drawn_seed:
            self.seed = self.settings["seed"] = checkpoint["settings"]["seed"]
        self._checkpoint = checkpoint

    @property
    def _seed_after_checkpoint(self) -> int:
        """Seed of all random numbers after the latest checkpoint."""
        return derive_seed(self.seed, Stream.CONTINUATION, self._num_checkpoints)

    @property
    def updates_per_train_batch(self) -> int | None:
        """The number of updates in one use of a train batch, the unit of lags that do not depend on minibatches.

        None before the start, and where the lag is always 0 or unbounded: collection is synchronous, there are replay
        shards, or the storage is a replay buffer.
        """
        is_async = isinstance(self.nested.collection, AsynchronousCollection)
        if self._worker is None or not is_async or provided_kind(self.agent.storage_factory).is_kept:
            return None
        algo = self._worker.local_worker.algo
        return algo.num_epochs * algo.num_mini_batch

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters, for which the tree is started."""
        return sum(parameter.numel() for parameter in self.update_worker.local_worker.actor.parameters())

    @property
    def is_between_train_batches(self) -> bool:
        """Whether every gradient worker will start a new train batch in the next `step`; see `UpdateStrategy`."""
        return self._worker is None or self._worker.is_between_train_batches

    @in_turn("_end")
    def stop(self) -> MetricsDict:
        """Stop every worker, thread and process of this scheme. Repeated calls have no effect.

        Returns:
            The final ledger, in which nothing is in flight or queued.
        """
        if self._final is None:
            if self.evaluations is not None:
                self.evaluations.interrupt()
            try:
                self._final = self._worker.stop() if self._worker is not None else LedgerSnapshot()
            finally:
                self._abandon()
        return self._final.to_dict()

    def _abandon(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._runtime is not None:
            self._runtime.close()
        self._runtime = self.evaluations = None
        interrupt_as_usual()
        PROGRAM.leave(self)

    # State and statistics

    @property
    def version(self) -> int:
        """Number of updates made."""
        return 0 if self._worker is None else self._worker.actor_version

    @property
    def env_steps(self) -> int:
        """Number of env steps collected, as of the last messages; with a data set, the number of updates made."""
        if self.learns_offline:
            return self.version
        return 0 if self._worker is None else self._worker.statistics.tree_ledger.collected

    @property
    def learns_offline(self) -> bool:
        """Whether the agent learns from a data set: nothing is collected, and updates take the place of env steps."""
        return dataset_of(self.nested.collection) is not None

    def ledger(self) -> MetricsDict:
        """Return consistent counts of the env steps that are in flight, queued, consumed etc.; see `LedgerSnapshot`."""
        if self._final is not None:
            return self._final.to_dict()
        return (LedgerSnapshot() if self._worker is None else self._worker.statistics.tree_ledger.total()).to_dict()

    def metrics(self) -> MetricsDict:
        """Return counters, lags, bytes and times; see `Statistics.metrics`."""
        return self.update_worker.statistics.metrics() if self._final is None or self._worker else {}

    def episodes(self) -> list[Episode]:
        """Return the training episodes that ended since the last call, at most the latest 10,000."""
        return [] if self._worker is None else self._worker.statistics.take_episodes()

    # Parameters, models and evaluation

    def update_algorithm_parameter(self, name: str, value: object) -> None:
        """Change an updatable parameter of the algorithm in every worker."""
        self.update_worker.update_algorithm_parameter(name, value)

    def acting_state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the acting state: flat parameter vectors and normalizers, by name."""
        state = self.update_worker.get_weights().state
        return {key: torch.as_tensor(value).clone() for key, value in state.items()}

    def save_model(self, path: str) -> str:
        """Save the actor as a file that `torch.load(path, weights_only=True)` reads."""
        return self.update_worker.save_model(path)

    def save_evaluated_model(self, path: str) -> str:
        """Save the actor with the weights of the last evaluation, in the format of `save_model`.

        Raises:
            ConfigError: No evaluation has been started.
        """
        weights = None if self.evaluations is None else self.evaluations.weights
        if weights is None:
            raise ConfigError("no evaluation has been started, so there are no evaluated weights; evaluate first, or "
                              "save the current weights with evaluated=False")
        state = {name: torch.as_tensor(value) for name, value in weights.state.items()}
        return save(path, {"format": MODEL_FORMAT, "version": weights.version, "acting_state": state})

    def start_evaluation(self, num_episodes: int, timeout_s: float | None = None) -> None:
        """Start an evaluation of the current weights on a separate worker, with an optional time limit in seconds.

        Raises:
            ConfigError: There are no test environments.
        """
        if self.agent.test_envs_factory is None:
            raise ConfigError("evaluation needs test_envs_factory, which is None; give it to the scheme")
        weights = self.update_worker.get_weights()
        if self.evaluations is None:
            assert self._runtime is not None
            remote = self.has_remote_workers
            self.evaluations = Evaluations(
                self._runtime if remote else self._runtime.in_process(),
                _evaluator_of(self.agent, self.seed, self.nested.process.num_threads if remote else None),
                retries=self.nested.supervision.on_worker_failure != "raise")
        self.evaluations.start(weights, num_episodes, timeout_s)

    def poll_evaluation(self) -> Evaluation | None:
        """Return the evaluation if it has finished, else None. Each evaluation is returned once."""
        return None if self.evaluations is None else self.evaluations.poll()

    def wait_evaluation(self, timeout_s: float) -> Evaluation | None:
        """Wait for the running evaluation and return it; None if none runs. Raise an error on failure or timeout."""
        return None if self.evaluations is None else self.evaluations.wait(timeout_s)


def stop_if_dropped(scheme: object, settings: Settings, worker: UWorker,
                    runtime: Runtime) -> weakref.finalize[..., object]:
    """Return a finalizer that stops the threads and processes of `scheme` when `scheme` is garbage-collected.

    The finalizer does nothing if no work runs in the background: in a simulated run, or if collection is synchronous
    and there are no remote workers.

    Args:
        scheme: The scheme, which has been started.
        settings: The settings of the scheme.
        worker: The root of the worker tree.
        runtime: The runtime of the workers. Neither the runtime nor the tree may refer to the scheme, because a
            reference would prevent its garbage collection.
    """
    is_active = settings.has_remote_workers or settings.flat()["col_communication"] == ASYNC
    if not is_active or isinstance(runtime, SimulatedRuntime):
        return weakref.finalize(scheme, lambda: None)
    finalizer = weakref.finalize(scheme, _dropped, worker, runtime)
    finalizer.atexit = False  # at the exit of the program, daemon threads and processes end by themselves
    return finalizer


def _dropped(worker: UWorker, runtime: Runtime) -> None:
    # The garbage collector may run in any thread, even in a thread that `worker.stop()` would have to join.
    threading.Thread(target=_stop, args=(worker, runtime), name="DroppedScheme", daemon=True).start()
    warnings.warn("a scheme or learner was dropped while its workers were running, and is stopped; call stop(), or use "
                  "a `with` block", ResourceWarning, stacklevel=2)


def _stop(worker: UWorker, runtime: Runtime) -> None:
    try:
        worker.stop()
    except Exception:  # no caller is left that could receive the error
        logger.exception("a scheme that was dropped could not be stopped in order; its workers are ended")
    finally:
        runtime.close()
