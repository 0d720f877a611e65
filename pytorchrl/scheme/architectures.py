"""Architectures from the literature, expressed as settings of the worker tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

from pytorchrl.agent.data import DataKind
from pytorchrl.agent.declarations import as_member
from pytorchrl.agent.fit import algorithms_for, learned_kind, provided_kind
from pytorchrl.agent.option_values.text import to_python
from pytorchrl.agent.options import Factory
from pytorchrl.errors import ConfigError, Problem
from pytorchrl.scheme.options.base import ASYNC, SYNC
from pytorchrl.scheme.options.gradients import GWorkerSetOptions
from pytorchrl.scheme.replay.storage_options import has_priorities
from pytorchrl.support.problems import Problems, error_of, problems_in
from pytorchrl.support.tracebacks import brief_errors_of

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from pytorchrl.agent.env import EnvFactory
    from pytorchrl.agent.factories import ActorFactory, AlgorithmFactory, StorageFactory
    from pytorchrl.scheme.options.keywords import ArchitectureKeywords


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The settings of a named architecture.

    Attributes:
        name: Name of the architecture.
        fixed: Settings that define the architecture; other values are refused.
        defaults: Settings that replace the defaults of `Scheme`.
        least: Name of a setting -> (smallest allowed value, reason for this limit).
        learner: Whether the default of `grad_communication` depends on the number of gradient workers. If so, a single
            worker learns asynchronously in a separate thread, and several workers communicate synchronously.
        kinds: Kinds of data that the architecture can provide; the algorithm must learn from one of them.
    """

    name: str
    fixed: Mapping[str, object]
    defaults: Mapping[str, object]
    least: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    learner: bool = False
    kinds: tuple[DataKind, ...] = tuple(DataKind)

    def settings(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return keyword arguments for `Scheme`: the architecture's settings and the user's settings `given`.

        Settings in `given` replace the architecture's defaults, but not the settings that define the architecture.
        """
        settings = {**self.defaults, **given, **self.fixed}
        if self.learner:
            number = settings.get("num_grad_workers", GWorkerSetOptions.num_grad_workers)
            settings.setdefault("grad_communication", ASYNC if number == 1 else SYNC)
        return settings

    def problems(
        self, algo_factory: object, given: Mapping[str, object], actor_factory: object = None,
    ) -> list[Problem]:
        """Return the contradictions between the architecture and the algorithm or the user's settings `given`."""
        problems = [
            Problem(f"{self.name} means {name}={to_python(value)}, got {to_python(given[name])}",
                    f"leave {name} out, or build a plain Scheme", (name,))
            for name, value in self.fixed.items()
            if name in given and as_member(type(value), given[name]) != value]
        settings = self.settings(given)
        problems += [
            Problem(f"{why}: {name}={value} is too small", f"give {low} or more", (name,))
            for name, (low, why) in self.least.items() if isinstance(value := settings[name], int) and value < low]
        # `Scheme` itself refuses an algorithm that is not a factory.
        if not isinstance(algo_factory, Factory) or (found := learned_kind(algo_factory, actor_factory)) in self.kinds:
            return problems
        name, nearest = algo_factory.cls.__name__, getattr(algo_factory.cls, "nearest_with_lag", None)
        if found is DataKind.ROLLOUTS and DataKind.OLDER_ROLLOUTS in self.kinds and nearest is not None:
            problems.append(Problem(
                f"{self.name} collects with policies that are older than the learner's, but {name} has no correction "
                "for this policy lag", f"use {nearest}, the nearest algorithm with a correction"))
        else:
            problems.append(Problem(
                f"{self.name} provides {', '.join(kind.value for kind in self.kinds)}, but {name} learns from "
                f"{found.value}",
                f"algorithms for {self.name}: {algorithms_for(*self.kinds)}"))
        return problems


_LAGGING = (DataKind.OLDER_ROLLOUTS, DataKind.GROUPS, DataKind.TRANSITIONS, DataKind.SEQUENCES)
_NO_REMOTE_WORKER = "asynchronous gradients need a remote worker, but with num_grad_workers=1 there is none"

_WITH_SHARDS = {"num_col_workers": 2, "num_replay_workers": 1, "max_weight_sync_delay": 400}

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in (
    Preset(
        name="a3c",
        fixed={"col_communication": SYNC, "grad_communication": ASYNC, "distribute_gradients": False},
        defaults={"num_grad_workers": 2, "updates_per_step": 100},
        least={"num_grad_workers": (2, _NO_REMOTE_WORKER)}),
    Preset(
        name="ddppo",
        fixed={"col_communication": SYNC, "grad_communication": SYNC, "distribute_gradients": True},
        defaults={"num_grad_workers": 2, "col_fraction_workers": 0.6},
        least={"num_grad_workers": (2, "ranks average gradients among themselves")}),
    Preset(
        name="microbatch",
        fixed={"col_communication": SYNC, "grad_communication": SYNC, "num_grad_workers": 1},
        defaults={"train_batch_size": 10_000, "microbatch_size": 1000}),
    *(Preset(
        name=name, fixed={"col_communication": ASYNC},
        defaults={"num_col_workers": 2, "train_batch_size": 500},
        learner=True, kinds=_LAGGING) for name in ("impala", "appo")),
    Preset(
        name="apex", fixed={"col_communication": ASYNC},
        defaults=_WITH_SHARDS,
        learner=True, least={"num_replay_workers": (1, "replay is stored in shards")}, kinds=_LAGGING),
    Preset(
        name="r2d2", fixed={"col_communication": ASYNC, "routing": "by_stream"},
        defaults={**_WITH_SHARDS, "queue_size": 4},
        learner=True, least={"num_replay_workers": (1, "replay is stored in shards")}, kinds=(DataKind.SEQUENCES,)),
    Preset(
        name="rapid", fixed={"col_communication": ASYNC, "grad_communication": SYNC},
        defaults={"num_grad_workers": 2, "num_col_workers": 2, "distribute_gradients": True},
        least={"num_grad_workers": (2, "every learner is a gradient worker")}, kinds=_LAGGING),
)}


@brief_errors_of(*PRESETS)
class Architectures:
    """Constructors of `Scheme` for architectures from the literature. `print(scheme)` shows all its settings."""

    home: ClassVar[str] = "scheme"

    @classmethod
    def _named(cls, name: str, agent: tuple[object, ...], settings: ArchitectureKeywords) -> Self:
        given = cast("Mapping[str, object]", settings)
        complete = PRESETS[name].settings(given)
        if not (contradictions := PRESETS[name].problems(agent[0], given, agent[1])):
            return cls(*agent, **complete)
        problems = Problems()
        for problem in contradictions:
            problems.wrong(problem)
        problems.add(problems_in(lambda: cls(*agent, **complete)))
        raise error_of(problems.found)

    @classmethod
    def a3c(cls, algo_factory: AlgorithmFactory, actor_factory: ActorFactory, storage_factory: StorageFactory,
            train_envs_factory: EnvFactory, test_envs_factory: EnvFactory | None = None,
            **settings: Unpack[ArchitectureKeywords]) -> Self:
        """Build a scheme with asynchronous gradients (A3C, Mnih et al. 2016).

        Each gradient is applied when it arrives, and only the worker that sent it receives new weights.

        Args:
            algo_factory: Factory of the algorithm.
            actor_factory: Factory of the actor.
            storage_factory: Factory of the storage.
            train_envs_factory: Factory of each collection worker's environments.
            test_envs_factory: Factory of the evaluation's environments; None: no evaluation.
            **settings: Settings of `Scheme`. Defaults that differ from those of `Scheme`: `num_grad_workers=2`,
                `updates_per_step=100`.

        Raises:
            ConfigError: A setting is invalid, or contradicts the architecture or the algorithm.
        """
        agent = (algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory)
        return cls._named("a3c", agent, settings)

    @classmethod
    def ddppo(cls, algo_factory: AlgorithmFactory, actor_factory: ActorFactory, storage_factory: StorageFactory,
              train_envs_factory: EnvFactory, test_envs_factory: EnvFactory | None = None,
              **settings: Unpack[ArchitectureKeywords]) -> Self:
        """Build a scheme with decentralized gradients (DD-PPO, Wijmans et al. 2020).

        Gradient workers average gradients among themselves. Once the fraction `col_fraction_workers` of the gradient
        workers has finished collecting, the other gradient workers stop collecting.

        By default, each gradient worker collects its own data. With `num_col_workers >= 2`, each gradient worker has
        that many collection workers, and `col_fraction_workers` is a fraction of these collection workers.

        Args:
            algo_factory: Factory of the algorithm.
            actor_factory: Factory of the actor.
            storage_factory: Factory of the storage.
            train_envs_factory: Factory of each collection worker's environments.
            test_envs_factory: Factory of the evaluation's environments; None: no evaluation.
            **settings: Settings of `Scheme`. Defaults that differ from those of `Scheme`: `num_grad_workers=2`,
                `col_fraction_workers=0.6`.

        Raises:
            ConfigError: A setting is invalid, or contradicts the architecture or the algorithm.
        """
        agent = (algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory)
        return cls._named("ddppo", agent, settings)

    @classmethod
    def microbatch(cls, algo_factory: AlgorithmFactory, actor_factory: ActorFactory,
                   storage_factory: StorageFactory, train_envs_factory: EnvFactory,
                   test_envs_factory: EnvFactory | None = None, **settings: Unpack[ArchitectureKeywords]) -> Self:
        """Build a scheme for train batches that are too large for memory.

        The data of each update are collected in microbatches, whose gradients are accumulated.

        Args:
            algo_factory: Factory of the algorithm.
            actor_factory: Factory of the actor.
            storage_factory: Factory of the storage.
            train_envs_factory: Factory of each collection worker's environments.
            test_envs_factory: Factory of the evaluation's environments; None: no evaluation.
            **settings: Settings of `Scheme`. Defaults that differ from those of `Scheme`: `train_batch_size=10000`,
                `microbatch_size=1000`.

        Raises:
            ConfigError: A setting is invalid, or contradicts the architecture or the algorithm.
        """
        agent = (algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory)
        return cls._named("microbatch", agent, settings)

    @classmethod
    def impala(cls, algo_factory: AlgorithmFactory, actor_factory: ActorFactory, storage_factory: StorageFactory,
               train_envs_factory: EnvFactory, test_envs_factory: EnvFactory | None = None,
               **settings: Unpack[ArchitectureKeywords]) -> Self:
        """Build a scheme in which collection never waits for the learner (IMPALA, Espeholt et al. 2018).

        The algorithm must correct its targets for the policy lag of the data. By default, a single gradient worker
        makes asynchronous updates in a separate thread.

        Args:
            algo_factory: Factory of the algorithm.
            actor_factory: Factory of the actor.
            storage_factory: Factory of the storage.
            train_envs_factory: Factory of each collection worker's environments.
            test_envs_factory: Factory of the evaluation's environments; None: no evaluation.
            **settings: Settings of `Scheme`. Defaults that differ from those of `Scheme`: `num_col_workers=2`,
                `train_batch_size=500`.

        Raises:
            ConfigError: A setting is invalid, or contradicts the architecture or the algorithm.
        """
        agent = (algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory)
        return cls._named("impala", agent, settings)

    @classmethod
    def appo(cls, algo_factory: AlgorithmFactory, actor_factory: ActorFactory, storage_factory: StorageFactory,
             train_envs_factory: EnvFactory, test_envs_factory: EnvFactory | None = None,
             **settings: Unpack[ArchitectureKeywords]) -> Self:
        """Build a scheme as `impala` does, for an algorithm with a clipped surrogate objective (APPO, Luo et al. 2020).

        Args:
            algo_factory: Factory of the algorithm.
            actor_factory: Factory of the actor.
            storage_factory: Factory of the storage.
            train_envs_factory: Factory of each collection worker's environments.
            test_envs_factory: Factory of the evaluation's environments; None: no evaluation.
            **settings: Settings of `Scheme`, with the defaults of `impala`.

        Raises:
            ConfigError: A setting is invalid, or contradicts the architecture or the algorithm.
        """
        agent = (algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory)
        return cls._named("appo", agent, settings)

    @classmethod
    def apex(cls, algo_factory: AlgorithmFactory, actor_factory: ActorFactory, storage_factory: StorageFactory,
             train_envs_factory: EnvFactory, test_envs_factory: EnvFactory | None = None,
             **settings: Unpack[ArchitectureKeywords]) -> Self:
        """Build a scheme with replay shards between collection workers and one learner (Ape-X, Horgan et al. 2018).

        Use a storage such as `PERBuffer`, and set `epsilon_per_worker=True` for `DQN`. To replay whole rollouts, use
        `VTraceBuffer` with `IMPALA` or `APPO`, and set `size` of `Scheme`; or use `RolloutSequenceBuffer` with `R2D2`.

        Args:
            algo_factory: Factory of the algorithm.
            actor_factory: Factory of the actor.
            storage_factory: Factory of the storage.
            train_envs_factory: Factory of each collection worker's environments.
            test_envs_factory: Factory of the evaluation's environments; None: no evaluation.
            **settings: Settings of `Scheme`. Defaults that differ from those of `Scheme`: `num_col_workers=2`,
                `num_replay_workers=1`, `max_weight_sync_delay=400`, and, if the storage has priorities,
                `initial_priority="worker"`.

        Raises:
            ConfigError: A setting is invalid, or contradicts the architecture or the algorithm.
        """
        if has_priorities(storage_factory, settings) and "initial_priority" not in settings:
            if provided_kind(storage_factory) is DataKind.SEQUENCES:
                raise ConfigError(f"Scheme.apex gives new transitions priorities, but {storage_factory.cls.__name__} "
                                  "samples sequences; use Scheme.r2d2 (preset='r2d2'), which is for sequences")
            settings["initial_priority"] = "worker"
        agent = (algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory)
        return cls._named("apex", agent, settings)

    @classmethod
    def r2d2(cls, algo_factory: AlgorithmFactory, actor_factory: ActorFactory, storage_factory: StorageFactory,
             train_envs_factory: EnvFactory, test_envs_factory: EnvFactory | None = None,
             **settings: Unpack[ArchitectureKeywords]) -> Self:
        """Build a scheme as `apex` does, for actors with memory (R2D2, Kapturowski et al. 2019).

        The algorithm learns from sequences. The storage is `SequenceBuffer`, or `RolloutSequenceBuffer`, which replays
        whole rollouts.

        Args:
            algo_factory: Factory of the algorithm.
            actor_factory: Factory of the actor.
            storage_factory: Factory of the storage.
            train_envs_factory: Factory of each collection worker's environments.
            test_envs_factory: Factory of the evaluation's environments; None: no evaluation.
            **settings: Settings of `Scheme`. The defaults are those of `apex`, except that `queue_size` is 4;
                `routing` is always `"by_stream"`.

        Raises:
            ConfigError: A setting is invalid, or contradicts the architecture or the algorithm.
        """
        agent = (algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory)
        return cls._named("r2d2", agent, settings)

    @classmethod
    def rapid(cls, algo_factory: AlgorithmFactory, actor_factory: ActorFactory, storage_factory: StorageFactory,
              train_envs_factory: EnvFactory, test_envs_factory: EnvFactory | None = None,
              **settings: Unpack[ArchitectureKeywords]) -> Self:
        """Build a scheme of decentralized gradient workers with asynchronous collection (Rapid, Berner et al. 2019).

        The algorithm must correct for policy lag, as `APPO` does.

        Args:
            algo_factory: Factory of the algorithm.
            actor_factory: Factory of the actor.
            storage_factory: Factory of the storage.
            train_envs_factory: Factory of each collection worker's environments.
            test_envs_factory: Factory of the evaluation's environments; None: no evaluation.
            **settings: Settings of `Scheme`. Defaults that differ from those of `Scheme`: `num_grad_workers=2`,
                `num_col_workers=2`, `distribute_gradients=True`.

        Raises:
            ConfigError: A setting is invalid, or contradicts the architecture or the algorithm.
        """
        agent = (algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory)
        return cls._named("rapid", agent, settings)
