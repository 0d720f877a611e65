"""Schemes that have a name of their own in the literature: settings of the one tree, and what must not contradict them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pytorchrl.agent.data import DataKind
from pytorchrl.agent.fit import algorithms_for, learned_kind
from pytorchrl.agent.options import Factory
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.base.worker import ASYNC, SYNC
from pytorchrl.scheme.replay.storage_options import has_priorities
from pytorchrl.tracebacks import brief_errors_of

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What a name stands for.

    Attributes:
        name: The name.
        fixed: Settings that make it what it is; others are refused.
        defaults: Settings that hold where nothing else is given.
        least: Setting -> (smallest count, why a smaller one contradicts the name).
        learner: Whether one gradient worker learns in a thread of its own (asynchronous gradients), and several in step.
        kinds: Kinds of data that the algorithm may learn from.
    """

    name: str
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any]
    least: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    learner: bool = False
    kinds: tuple[DataKind, ...] = tuple(DataKind)

    def settings(self, algo_factory: Factory[Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of `Scheme`, those `given` among them.

        Raises:
            ConfigError: One of them contradicts the name, or the algorithm cannot learn so; all problems at once.
        """
        problems = [f"{self.name} means {name}={_shown(value)}, got {_shown(given[name])}; leave it out, or build a plain Scheme"
                    for name, value in self.fixed.items() if name in given and given[name] != value]
        settings = {**self.defaults, **given, **self.fixed}
        if self.learner:
            settings.setdefault("grad_communication", ASYNC if settings.get("num_grad_workers", 1) == 1 else SYNC)
        problems += [f"{why}: {name}={settings[name]} is too few, give {low} or more"
                     for name, (low, why) in self.least.items() if isinstance(settings[name], int) and settings[name] < low]
        # What is no factory is refused by the scheme itself.
        if isinstance(algo_factory, Factory):
            found = learned_kind(algo_factory)
            if found not in self.kinds:
                problems.append(f"{self.name} gives {', '.join(kind.value for kind in self.kinds)}, but {algo_factory.cls.__name__} "
                                f"learns from {found.value}; algorithms for {self.name}: {algorithms_for(*self.kinds)}")
        if problems:
            raise ConfigError("; ".join(problems))
        return settings


def _shown(value: Any) -> str:
    return repr(str(value)) if isinstance(value, str) else repr(value)


_LAGGING = (DataKind.OLDER_ROLLOUTS, DataKind.TRANSITIONS, DataKind.SEQUENCES)
_NO_REMOTE_WORKER = "asynchronous gradients need a remote worker, and num_grad_workers=1 means none"

_WITH_SHARDS = {"num_col_workers": 2, "num_replay_workers": 1, "queue_timeout_s": 300.0, "col_in_flight": 2, "add_in_flight": 2,
                "prefetch": 4, "max_weight_sync_delay": 400}

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in (
    Preset(
        name="a3c",
        fixed={"col_communication": SYNC, "grad_communication": ASYNC, "distribute_gradients": False},
        defaults={"num_grad_workers": 2, "updates_per_step": 100, "aggregate": 1, "max_grad_lag": None, "lag_policy": "apply"},
        least={"num_grad_workers": (2, _NO_REMOTE_WORKER)}),
    Preset(
        name="ddppo",
        fixed={"col_communication": SYNC, "grad_communication": SYNC, "distribute_gradients": True},
        defaults={"num_grad_workers": 2, "num_col_workers": 1, "col_fraction_workers": 0.6, "fraction_samples": 0.25},
        least={"num_grad_workers": (2, "ranks average among themselves")}),
    Preset(
        name="microbatch",
        fixed={"col_communication": SYNC, "grad_communication": SYNC, "num_grad_workers": 1},
        defaults={"num_col_workers": 1, "train_batch_size": 10_000, "microbatch_size": 1000, "prefetch": None, "norm_over": "batch"}),
    *(Preset(
        name=name, fixed={"col_communication": ASYNC},
        defaults={"num_col_workers": 2, "num_grad_workers": 1, "train_batch_size": 500, "queue_size": 16, "queue_timeout_s": 300.0,
                  "minibatch_buffer_size": 1, "num_passes": 1, "col_in_flight": 2, "broadcast_interval": 1},
        learner=True, kinds=_LAGGING) for name in ("impala", "appo")),
    Preset(
        name="apex", fixed={"col_communication": ASYNC},
        defaults={**_WITH_SHARDS, "routing": "round_robin"},
        learner=True, least={"num_replay_workers": (1, "replay is in shards")}, kinds=_LAGGING),
    Preset(
        name="r2d2", fixed={"col_communication": ASYNC, "routing": "by_stream"},
        defaults={**_WITH_SHARDS, "queue_size": 4},
        learner=True, least={"num_replay_workers": (1, "replay is in shards")}, kinds=(DataKind.SEQUENCES,)),
    Preset(
        name="rapid", fixed={"col_communication": ASYNC, "grad_communication": SYNC},
        defaults={"num_grad_workers": 2, "num_col_workers": 2, "queue_size": 4, "col_in_flight": 2, "broadcast_interval": 1,
                  "num_passes": 1, "distribute_gradients": True},
        least={"num_grad_workers": (2, "every learner is a gradient worker")}, kinds=_LAGGING),
)}


@brief_errors_of(*PRESETS)
class NamedSchemes:
    """A constructor for each name; it returns an ordinary scheme, and printing that shows every setting."""

    home: ClassVar[str] = "scheme"

    @classmethod
    def a3c(cls, algo_factory: Factory[Any], actor_factory: Factory[Any], storage_factory: Factory[Any],
            train_envs_factory: Factory[Any], test_envs_factory: Factory[Any] | None = None, **settings: Any) -> Self:
        """Asynchronous gradients (Mnih et al. 2016): gradients are applied as they come, and their senders alone answered.

        Args:
            algo_factory: Makes the algorithm.
            actor_factory: Makes the actor.
            storage_factory: Makes the storage.
            train_envs_factory: Makes each gradient worker's environments.
            test_envs_factory: Makes the evaluation's environments; None: no evaluation.
            **settings: `num_grad_workers=2`, `updates_per_step=100`, `aggregate=1`, `max_grad_lag=None`,
                `lag_policy="apply"`, and any other setting of `Scheme`.

        Raises:
            ConfigError: A setting is wrong, or contradicts asynchronous gradients.
        """
        return cls(algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory,  # type: ignore[call-arg]
                   **PRESETS["a3c"].settings(algo_factory, settings))

    @classmethod
    def ddppo(cls, algo_factory: Factory[Any], actor_factory: Factory[Any], storage_factory: Factory[Any],
              train_envs_factory: Factory[Any], test_envs_factory: Factory[Any] | None = None, **settings: Any) -> Self:
        """Decentralised gradients (Wijmans et al. 2020): ranks average among themselves, stragglers are stopped early.

        Arguments as of `a3c`; the settings are `num_grad_workers=2`, `num_col_workers=1`, `col_fraction_workers=0.6`,
        `fraction_samples=0.25`. Each rank collects by itself, and the share is that of ranks; with `num_col_workers` of 2 or
        more it is that of each rank's collection workers.
        """
        return cls(algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory,  # type: ignore[call-arg]
                   **PRESETS["ddppo"].settings(algo_factory, settings))

    @classmethod
    def microbatch(cls, algo_factory: Factory[Any], actor_factory: Factory[Any], storage_factory: Factory[Any],
                   train_envs_factory: Factory[Any], test_envs_factory: Factory[Any] | None = None, **settings: Any) -> Self:
        """Updates on batches larger than memory: collected and differentiated by pieces, one step of the optimiser.

        Arguments as of `a3c`; the settings are `num_col_workers=1`, `train_batch_size=10000`, `microbatch_size=1000`,
        `prefetch=None`, `norm_over="batch"`.
        """
        return cls(algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory,  # type: ignore[call-arg]
                   **PRESETS["microbatch"].settings(algo_factory, settings))

    @classmethod
    def impala(cls, algo_factory: Factory[Any], actor_factory: Factory[Any], storage_factory: Factory[Any],
               train_envs_factory: Factory[Any], test_envs_factory: Factory[Any] | None = None, **settings: Any) -> Self:
        """Collectors that never wait for the learner, whose targets are corrected for the lag (Espeholt et al. 2018).

        Arguments as of `a3c`; the settings are `num_col_workers=2`, `num_grad_workers=1`, `train_batch_size=500`,
        `queue_size=16`, `minibatch_buffer_size=1`, `num_passes=1`, `col_in_flight=2`, `broadcast_interval=1`.
        """
        return cls(algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory,  # type: ignore[call-arg]
                   **PRESETS["impala"].settings(algo_factory, settings))

    @classmethod
    def appo(cls, algo_factory: Factory[Any], actor_factory: Factory[Any], storage_factory: Factory[Any],
             train_envs_factory: Factory[Any], test_envs_factory: Factory[Any] | None = None, **settings: Any) -> Self:
        """As `impala`, with a clipped surrogate in place of the policy gradient (Luo et al. 2020).

        Arguments as of `a3c`; the settings are as of `impala`.
        """
        return cls(algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory,  # type: ignore[call-arg]
                   **PRESETS["appo"].settings(algo_factory, settings))

    @classmethod
    def apex(cls, algo_factory: Factory[Any], actor_factory: Factory[Any], storage_factory: Factory[Any],
             train_envs_factory: Factory[Any], test_envs_factory: Factory[Any] | None = None, **settings: Any) -> Self:
        """Replay shards between many collectors and one learner (Horgan et al. 2018).

        Arguments as of `a3c`; the settings are `num_col_workers=2`, `num_replay_workers=1`, `max_weight_sync_delay=400`,
        `col_in_flight=2`, `prefetch=4`, `add_in_flight=2`, `routing="round_robin"`. The storage is such as `PERBuffer`, and
        `DQN` has `epsilon_per_worker=True`. Where the storage has priorities, `initial_priority="worker"`. With `kind="batch"`
        the algorithm corrects for lag, such as `IMPALA`, the storage is `VTraceBuffer`, and `size` is that of the replay; or the
        algorithm is `R2D2`, and the storage `RolloutSequenceBuffer`.
        """
        if has_priorities(storage_factory, settings):
            settings.setdefault("initial_priority", "worker")
        return cls(algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory,  # type: ignore[call-arg]
                   **PRESETS["apex"].settings(algo_factory, settings))

    @classmethod
    def r2d2(cls, algo_factory: Factory[Any], actor_factory: Factory[Any], storage_factory: Factory[Any],
             train_envs_factory: Factory[Any], test_envs_factory: Factory[Any] | None = None, **settings: Any) -> Self:
        """As `apex`, for sequences and an actor with memory (Kapturowski et al. 2019).

        Arguments as of `a3c`; the settings are as of `apex`, but `queue_size=4`, and `routing="by_stream"` always. The storage is
        `SequenceBuffer`, or, with `kind="batch"`, `RolloutSequenceBuffer`, which replays whole rollouts.

        Raises:
            ConfigError: A setting is wrong, or the algorithm learns from single transitions.
        """
        return cls(algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory,  # type: ignore[call-arg]
                   **PRESETS["r2d2"].settings(algo_factory, settings))

    @classmethod
    def rapid(cls, algo_factory: Factory[Any], actor_factory: Factory[Any], storage_factory: Factory[Any],
              train_envs_factory: Factory[Any], test_envs_factory: Factory[Any] | None = None, **settings: Any) -> Self:
        """Decentralised gradient workers, each with collectors of its own that never wait (Berner et al. 2019).

        Arguments as of `a3c`; the settings are `num_grad_workers=2`, `num_col_workers=2`, `queue_size=4`,
        `col_in_flight=2`, `broadcast_interval=1`, `num_passes=1`, `distribute_gradients=True`. The algorithm is one that
        corrects for lag, such as `APPO`.
        """
        return cls(algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory,  # type: ignore[call-arg]
                   **PRESETS["rapid"].settings(algo_factory, settings))
