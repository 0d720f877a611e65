"""The scheme: an agent, where its operations run, and which of them wait for one another."""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytorchrl.agent.data import Episode
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import Factory
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.errors import CheckpointError, ConfigError, DeadlockError, ReplayError, StoppedError
from pytorchrl.runtime import Runtime, ThreadRuntime, make_runtime
from pytorchrl.scheme.agent_parts import AgentParts, check_parts
from pytorchrl.scheme.architectures import Architectures
from pytorchrl.scheme.gradients.g_worker_set import GWorkerSetFactory
from pytorchrl.scheme.gradients.kinds import Collection, ReplayCollection
from pytorchrl.scheme.gradients.settled import settled
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.recording.record import RecordWriter, as_json, describe, differences, read_record
from pytorchrl.scheme.replay.storage_options import options_in_settings, with_options
from pytorchrl.scheme.rules import checked_settings, warnings_of
from pytorchrl.scheme.settings import STORAGE_KEYWORDS, RuntimeKind, Simulated, known_keywords
from pytorchrl.scheme.supervision.evaluation import Evaluation
from pytorchrl.scheme.supervision.evaluations import Evaluations
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.updates.kinds import GradientPattern, Gradients, gradients_of
from pytorchrl.scheme.updates.u_worker import UWorker
from pytorchrl.terminal import printable
from pytorchrl.tracebacks import brief_errors_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pytorchrl.agent.actors.base import Actor
    from pytorchrl.agent.algorithms.base import Algorithm
    from pytorchrl.agent.env import EnvFactory
    from pytorchrl.agent.storages.base import Storage
    from pytorchrl.scheme.keywords import SchemeKeywords, UpdateKeywords

_CHECKPOINT_FORMAT = "pytorchrl checkpoint 1"
# Settings that may differ when a run resumes, besides those in which a replay may differ from its record.
_FREE_TO_RESUME = {"faults", "on_worker_failure"}


@brief_errors_of("__init__", "from_factory", "start", "resume")
class Scheme(Architectures):
    """An agent and the tree of workers that trains it. The constructor checks everything; `start` starts the workers.

    The settings can be given as flat keywords, as kinds (`collection`, `gradients`, `runtime`), or as nested factories
    (`from_factory`). All forms build the same tree. An option has one name, and its default, range and help are in the
    `Options` class of its owner: see the page "Options".

    Args:
        algo_factory: Factory of the algorithm, e.g. `PPO.create_factory(...)`.
        actor_factory: Factory of the actor.
        storage_factory: Factory of the storage.
        train_envs_factory: Factory of each collection worker's environments.
        test_envs_factory: Factory of the evaluation's environments; None: no evaluation.
        collection: Kind of collection with its options; None: made of the flat keywords.
        gradients: Kind of gradients with their options; None: made of the flat keywords.
        runtime: "ray", "threads", "simulated" or a kind with its options; None: Ray if there are remote workers.
        supervision: Options for lost workers; None: made of the flat keywords.
        **settings: Flat keywords.

    Attributes:
        agent: The factories, with the options of the storage that were given to the scheme.
        seed: The seed in force.
        settings: Every setting by its flat name, JSON-able.
        nested: The settings by level.
        evaluations: The evaluations beside training; None before the first one.

    Raises:
        ConfigError: A setting is wrong, or settings contradict each other. The message lists all problems.
    """

    @checked_names
    def __init__(self, algo_factory: Factory[Algorithm], actor_factory: Factory[Actor],  # noqa: PLR0913 - one a level
                 storage_factory: Factory[Storage], train_envs_factory: EnvFactory,
                 test_envs_factory: EnvFactory | None = None, *, collection: Collection | None = None,
                 gradients: Gradients | None = None, runtime: RuntimeKind | str | None = None,
                 supervision: Supervisor.Options | None = None, **settings: Unpack[SchemeKeywords]) -> None:
        keywords: dict[str, object] = {**settings}
        for_storage = {name: keywords.pop(name) for name in STORAGE_KEYWORDS if name in keywords}
        nested = checked_settings(keywords, collection=collection, gradients=gradients, runtime=runtime,
                                  supervision=supervision,
                                  for_storage=for_storage)
        if isinstance(nested.collection, ReplayCollection) and isinstance(storage_factory, Factory):
            storage_factory = with_options(storage_factory, {**for_storage, "size": nested.collection.size})
        self.agent = AgentParts(algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory)
        texts = [*warnings_of(nested), *check_parts(self.agent, nested)]
        collection, more = settled(nested.collection, self.agent.collectors(nested.collection))
        self.nested = replace(nested, collection=collection)
        replay = self.nested.recording.replay
        self._replay = None if replay is None else read_record(replay)
        self._settle_seed()
        self.settings: dict[str, object] = self.nested.flat() | options_in_settings(for_storage, storage_factory)
        if self._replay is not None:
            self._replay.check(self.settings, self.agent.as_dict())
            more += filter(None, [self._replay.warning()])
        for text in [*texts, *more]:
            # the line of the caller, two decorators above this constructor
            warnings.warn(printable(text), stacklevel=4)
        self._runtime: Runtime | None = None
        self._worker: UWorker | None = None
        self.evaluations: Evaluations | None = None
        self._final: LedgerSnapshot | None = None
        self._threads_before: int | None = None
        self._checkpoint: Mapping[str, Any] | None = None  # to go on from
        self._num_checkpoints = 0

    @classmethod
    def known_keywords(cls) -> Mapping[str, tuple[str, str]]:
        """Return the flat keywords, name -> (home, name), for suggestions in errors."""
        return known_keywords()

    @classmethod
    def from_factory(cls, gradients: GWorkerSetFactory, test_envs_factory: EnvFactory | None = None, *,
                     runtime: RuntimeKind | str | None = None, **settings: Unpack[UpdateKeywords]) -> Scheme:
        """Return the scheme whose gradient workers a factory builds.

        Args:
            gradients: What `GWorkerSet.create_factory` returns.
            test_envs_factory: Factory of the evaluation's environments; None: no evaluation.
            runtime: As for `Scheme`.
            **settings: Settings of the update worker, the runtime, supervision, recording and the process.

        Raises:
            ConfigError: A setting is wrong, or levels of the tree contradict each other.
        """
        if not isinstance(gradients, GWorkerSetFactory):
            raise ConfigError(f"from_factory needs the result of GWorkerSet.create_factory(...), got {gradients!r}")
        keywords: dict[str, object] = {**settings}
        kind = gradients_of(keywords, gradients.options)
        chosen = {*kind.declarations(), *GradientPattern.declarations()}
        rest: dict[str, Any] = {name: value for name, value in keywords.items() if name not in chosen}
        col = gradients.col_workers_factory
        return cls(col.algo_factory, col.actor_factory, col.storage_factory, col.train_envs_factory, test_envs_factory,
                   collection=gradients.collection, gradients=kind, runtime=runtime, **rest)

    def _settle_seed(self) -> None:
        """Take the given seed, that of the record to replay, or draw one."""
        seed = self.nested.process.seed
        self._has_drawn_seed = seed is None
        if seed is None:
            seed = secrets.randbits(32) if self._replay is None else self._replay.settings["seed"]
        self.seed = seed
        self.nested = replace(self.nested, process=replace(self.nested.process, seed=seed))

    def __repr__(self) -> str:
        agent = [f"  {name}={factory!r}" for name, factory in self.agent.as_dict().items()]
        return "Scheme(\n" + ",\n".join([*agent, *(f"  {k}={v!r}" for k, v in self.settings.items())]) + ")"

    # Life

    @property
    def runtime(self) -> Runtime | None:
        """The runtime of the workers; None before the start and after the stop."""
        return self._runtime

    @property
    def has_remote_workers(self) -> bool:
        """Whether any worker runs outside this process."""
        return self.nested.has_remote_workers

    def start(self, target_steps: int = 1, announce: Callable[[str], None] | None = None) -> UWorker:
        """Build the worker tree; `step` does so, too, if it was not built.

        Args:
            target_steps: Env steps at which schedules end.
            announce: Called with progress of the start.

        Raises:
            StartError: Resources are missing, Ray cannot be reached, or a worker did not start.
        """
        if self._final is not None:
            raise StoppedError("this scheme has been stopped; build a new one")
        if self._worker is None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(self.nested.process.num_threads)
            self._check_target(target_steps)
            path = self.nested.recording.record
            record = None if path is None else RecordWriter(str(path), self.settings, self.agent.as_dict(),
                                                            target_steps)
            self._runtime = make_runtime(
                self._runtime_options(), seed=self.seed, is_recording=record is not None,
                replay=None if self._replay is None else self._replay.parts)
            self._runtime.announce = announce
            try:
                self._worker = self._build(self._runtime, target_steps, record)
                self._worker.ready()
                if self._checkpoint is not None:
                    self._num_checkpoints = self._checkpoint["part"]
                    self._worker.restore(self._checkpoint["state"], self._seed_after_checkpoint)
                    self._checkpoint = None
            except BaseException:
                if record is not None:
                    record.discard()
                self.stop()
                raise
        return self._worker

    def _runtime_options(self) -> Runtime.Options:
        """Return the options of the runtime; without remote workers threads do, and Ray is not started."""
        options = self.nested.runtime
        if self.has_remote_workers or isinstance(options, Simulated):
            return options
        return ThreadRuntime.Options(faults=options.faults)

    def _check_target(self, target_steps: int) -> None:
        if self._replay is not None and self._replay.target_steps != target_steps:
            raise ConfigError(f"replay {self._replay.path!r} has target_steps={self._replay.target_steps}, got "
                              f"{target_steps}; give the "
                              "same")

    def _build(self, runtime: Runtime, target_steps: int, record: RecordWriter | None) -> UWorker:
        nested = self.nested
        factory = replace(self.agent.workers(nested.gradients, nested.collection), supervision=nested.supervision,
                          seed=self.seed,
                          num_threads=nested.process.num_threads)
        return UWorker(
            factory, options=nested.updates, gradients=nested.gradients, device=nested.process.device,
            runtime=runtime, target_steps=target_steps, record=record, replay=self._replay)

    @property
    def replay_is_over(self) -> bool | None:
        """Whether a replayed run has come to its end; None where none is replayed."""
        num_rounds = 0 if self._worker is None else self._worker.num_rounds
        return None if self._replay is None else self._replay.is_over(num_rounds)

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
            raise ReplayError(f"the replayed run does not follow its record {self._replay.path!r}: "
                              f"{deadlock}") from deadlock

    def drain(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Bring to an end whatever is underway, so that nothing is in flight or queued; the next `step()` goes on.

        Nobody is asked for anything more. Rollouts that are being made are finished; replay takes them, and what is in
        replay stays. Gradients and data that no update has used are given up, as `dropped["shutdown"]`. At most the
        update that a thread is making is made.

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
        """Return the whole state of the run, from which a scheme with the same settings can resume.

        The tree is drained first. Afterwards this scheme and one that resumes continue alike: environments begin new
        episodes, and all random numbers come from new seeds, which derive from the experiment's seed and the number of
        checkpoints. So the state of environments, generators and processes need not be saved. With synchronous
        collection and gradients on a CPU, both compute the same, bit for bit.

        Args:
            timeout_s: Seconds; see `drain`.

        Returns:
            Plain values and tensors: parameters, optimizers, target networks, normalizers, schedules, replay, the
            ledger, and remainders of lossy gradients. Parts of it may be live: save it before the next step.

        Raises:
            ConfigError: The run is recorded or replayed.
            StoppedError: The scheme was stopped.
            Exception: The error that ended a worker or thread.
        """
        self._check_timeout(timeout_s)
        if self._final is not None:
            raise StoppedError("this scheme has been stopped; make checkpoints before")
        worker = self.update_worker
        self._num_checkpoints += 1
        state = worker.checkpoint(self._seed_after_checkpoint, timeout_s)
        return {"format": _CHECKPOINT_FORMAT, "settings": as_json(self.settings),
                "agent": describe(self.agent.as_dict()),
                "part": self._num_checkpoints, "state": state}

    def resume(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from the `checkpoint()` of a scheme with the same settings, once started.

        A seed that was drawn becomes the seed of this scheme. Placement, resources, faults and evaluation may differ.

        Raises:
            CheckpointError: The checkpoint is from another kind of agent or scheme. The message names all differences.
            ConfigError: This scheme was started, is recorded, or is a replay.
        """
        if self._worker is not None or self._final is not None:
            raise ConfigError("only a scheme that has not been started can resume; build a new one")
        if self.nested.recording.record is not None or self._replay is not None:
            raise ConfigError("a run that resumes cannot be recorded or replayed; leave record and replay out")
        if checkpoint.get("format") != _CHECKPOINT_FORMAT:
            raise CheckpointError(f"not a checkpoint of this version: its format is {checkpoint.get('format')!r}, "
                                  "expected "
                                  f"{_CHECKPOINT_FORMAT!r}")
        if self._has_drawn_seed:
            self.seed = self.settings["seed"] = checkpoint["settings"]["seed"]
        agent = {name: part for name, part in self.agent.as_dict().items() if name != "test_envs_factory"}
        problems = differences(checkpoint["settings"], self.settings, checkpoint["agent"], agent, _FREE_TO_RESUME)
        if problems:
            raise CheckpointError(f"the checkpoint is of another run: {'; '.join(problems)}; use the settings that it "
                                  "was made with")
        self._checkpoint = checkpoint

    @property
    def _seed_after_checkpoint(self) -> int:
        """Of what comes after the last checkpoint."""
        return derive_seed(self.seed, Stream.PART, self._num_checkpoints)

    @property
    def is_between_items(self) -> bool:
        """Whether a checkpoint now would discard no data that is to be used again; always true of asynchronous collection."""
        return self._worker is None or self._worker.is_between_items

    def stop(self) -> dict[str, Any]:
        """End every worker, thread and process of this scheme. Idempotent.

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
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None
        self.evaluations = None
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
        if self.agent.test_envs_factory is None:
            raise ConfigError("evaluation needs test_envs_factory, which is None")
        weights = self.update_worker.get_weights()
        if self.evaluations is None:
            assert self._runtime is not None
            remote = self.has_remote_workers
            parameters = {"index_worker": 1, "algo_factory": self.agent.algo_factory,
                          "actor_factory": self.agent.actor_factory,
                          "test_envs_factory": self.agent.test_envs_factory, "seed": self.seed,
                          "num_threads": self.nested.process.num_threads if remote else None}
            self.evaluations = Evaluations(self._runtime if remote else self._runtime.in_process(), parameters,
                                            retries=self.nested.supervision.on_worker_failure != "raise")
        self.evaluations.start(weights, num_episodes)

    def poll_evaluation(self) -> Evaluation | None:
        """Return the evaluation if it has finished, else None. Each evaluation is returned once."""
        return None if self.evaluations is None else self.evaluations.poll()

    def wait_evaluation(self, timeout_s: float) -> Evaluation | None:
        """Wait for the running evaluation and return it; return None if none is running. Its error is raised."""
        return None if self.evaluations is None else self.evaluations.wait(timeout_s)
