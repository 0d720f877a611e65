"""What a scheme refuses before anything starts: wrong values, contradictions, parts that do not fit together."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.data import DataKind
from pytorchrl.agent.env import VecEnv
from pytorchrl.agent.fit import check_fit, given_kind
from pytorchrl.agent.multi.replay import MultiAgentReplay
from pytorchrl.agent.options import Factory
from pytorchrl.agent.seeding import check_seed
from pytorchrl.agent.storages.base import Storage
from pytorchrl.errors import ConfigError, FactoryError, FactorySerializationError, SpaceError
from pytorchrl.runtime import DEFAULT_RESOURCES, RUNTIMES, FaultPlan
from pytorchrl.runtime.costs import Costs
from pytorchrl.scheme.base.worker import (
    ASYNC,
    CENTRAL,
    PARALLEL,
    Communication,
    Execution,
    check_count,
    check_fraction,
)
from pytorchrl.scheme.devices import check_device, check_devices
from pytorchrl.scheme.gradients.microbatch import why_all_is_kept
from pytorchrl.scheme.gradients.sample_queue import BUFFERS, LAG_POLICIES, QUEUE_POLICIES, STARVED_POLICIES
from pytorchrl.scheme.replay.r_worker_set import FREE
from pytorchrl.scheme.replay.routing import ROUTINGS, TORN_BY
from pytorchrl.scheme.replay.storage_options import KINDS as REPLAY_KINDS
from pytorchrl.scheme.replay.storage_options import STORAGE_OPTIONS, check_kind, kind_of, rollout_steps
from pytorchrl.scheme.supervision.bad_batches import check_directory
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.encoder import DATA, GRADS, KINDS, WEIGHTS, Compression
from pytorchrl.scheme.updates.asynchronous import AsynchronousUpdates

_NORM_OVER = ("batch", "microbatch")
# Names of settings that must be left at their defaults, which are those of `Scheme`, where they have no effect.
_USES = ("minibatch_buffer_size", "num_passes", "ramp", "buffer", "replay_proportion")
_QUEUE_ONLY = (*_USES, "replay_slots", "queue_policy", "on_starved", "max_policy_lag", "on_policy_lag")
_ASYNC_ONLY = (*_QUEUE_ONLY, "queue_size", "col_in_flight", "broadcast_interval", "max_weight_sync_delay")
_NOT_WITH_REPLAY = (*_USES, "microbatch_size")
_REPLAY_ONLY = ("learning_starts", "add_in_flight", "routing", "kind", "initial_priority", "prioritized", *STORAGE_OPTIONS,
                "min_replay_ratio", "max_replay_ratio", "replay_worker_resources", "replay_debug")
_ASYNC_GRADS_ONLY = ("aggregate", "max_grad_lag", "lag_policy")
_RATIOS = ("min_replay_ratio", "max_replay_ratio")
_PREFETCH = 4
_INITIAL_PRIORITIES = ("max", "worker")
_CHOICES = {"initial_priority": _INITIAL_PRIORITIES, "queue_policy": QUEUE_POLICIES, "on_starved": STARVED_POLICIES,
            "buffer": BUFFERS, "on_policy_lag": LAG_POLICIES}
_LARGE_BYTES = 10 * 2**20
_RESOURCES = ("num_cpus", "num_gpus", "memory", "object_store_memory")


class Checks:
    """Checks the settings of a scheme; collects all problems and reports them at once.

    Args:
        given: Setting -> value.
        defaults: Setting -> what it is if the user says nothing.

    Attributes:
        warnings: Settings that are allowed but have no effect, or a bad one.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._options, self._defaults = dict(given), defaults
        self._problems: list[str] = []
        self._compresses = dict.fromkeys(KINDS, False)
        self.warnings: list[str] = []

    def run(self) -> dict[str, Any]:
        """The settings, parsed, with what was left open filled in; raises `ConfigError` if any is wrong."""
        options = self._options
        for name in ("num_col_workers", "num_grad_workers", "col_in_flight", "queue_size", "broadcast_interval",
                     "minibatch_buffer_size", "num_passes", "num_threads", "updates_per_step", "aggregate"):
            self._parse(name, partial(check_count, name))
        self._check_learner()
        for name in ("col_fraction_workers", "fraction_samples"):
            self._parse(name, partial(check_fraction, name))
        if not isinstance(options["distribute_gradients"], bool):
            self._problems.append(f"distribute_gradients must be True or False, got {options['distribute_gradients']!r}")
        for kind in KINDS:
            self._check_compression(kind)
        for name in ("col_communication", "grad_communication"):
            self._parse(name, Communication)
        self._check_replay_level()
        for name, check in (("seed", check_seed), ("col_num_threads", partial(check_count, "col_num_threads")),
                            ("keep_bad_batches", partial(check_directory, "keep_bad_batches"))):
            if options[name] is not None:
                self._parse(name, check)
        self._parse("on_worker_failure", lambda policy: Supervisor.Options(on_worker_failure=policy).on_worker_failure)
        self._check_gradient_lag()
        self._check_timeout()
        self._check_runtime()
        self._check_resources("col_worker_resources")
        self._check_resources("grad_worker_resources")
        self._raise()
        options["device"] = check_device(options["device"])
        for level in ("col", "grad"):
            self._derive_execution(level)
        self._raise()
        if options["runtime"] is None:
            remote = PARALLEL in (options["col_execution"], options["grad_execution"]) or (options["num_replay_workers"] or 0) > 1
            options["runtime"] = "ray" if remote else "threads"
        self._contradictions()
        self._problems += check_devices(options)
        self._check_microbatches()
        self._raise()
        return options

    def _raise(self) -> None:
        if self._problems:
            raise ConfigError("; ".join(self._problems))

    def _parse(self, name: str, parse: Callable[[Any], Any]) -> None:
        try:
            self._options[name] = parse(self._options[name])
        except ConfigError as error:
            text = str(error)
            self._problems.append(text if name in text else f"{name}: {text}")

    def _changed(self, names: Iterable[str]) -> list[str]:
        """Those settings that are not as they are if the user says nothing."""
        return [name for name in names if self._options[name] != self._defaults[name]]

    def _check_gradient_lag(self) -> None:
        options = self._options
        if options["max_grad_lag"] is not None:
            self._parse("max_grad_lag", partial(check_count, "max_grad_lag", low=0))
        self._parse("lag_policy", lambda policy: AsynchronousUpdates.Options(
            max_grad_lag=options["max_grad_lag"], lag_policy=policy).lag_policy)

    def _check_timeout(self) -> None:
        for name in ("queue_timeout_s", "worker_timeout_s"):
            value = self._options[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
                self._problems.append(f"{name} must be a number of seconds > 0, got {value!r}")

    def _check_compression(self, kind: str) -> None:
        name = f"compress_{kind}_to_send"
        try:
            compression = Compression.of(kind, self._options[name])
        except ConfigError as error:
            self._problems.append(str(error))
            return
        self._compresses[kind] = compression is not None
        is_repeated = self._options["record"] is not None or self._options["replay"] is not None
        if compression is not None and compression.is_auto and not compression.codec.is_lossless and is_repeated:
            self._problems.append(
                f"{name}={self._options[name]!r} decides by time what is rounded, so that a run could not be recorded or replayed; "
                f"give {compression.codec.name!r} or a lossless codec")

    def _check_learner(self) -> None:
        """What becomes of items between an asynchronous learner's queue and its updates."""
        options = self._options
        for name, low in (("max_weight_sync_delay", 1), ("max_policy_lag", 0), ("replay_slots", 0)):
            if options[name] is not None or name == "replay_slots":
                self._parse(name, partial(check_count, name, low=low))
        for name, choices in _CHOICES.items():
            if options[name] not in choices:
                self._problems.append(f"{name} must be one of {', '.join(choices)}, got {options[name]!r}")
        if options["ramp"] is not None and not isinstance(options["ramp"], bool):
            self._problems.append(f"ramp must be True, False or None, got {options['ramp']!r}")
        proportion, slots = options["replay_proportion"], options["replay_slots"]
        if isinstance(proportion, bool) or not isinstance(proportion, (int, float)) or not 0 <= proportion < math.inf:
            self._problems.append(f"replay_proportion must be a number >= 0, got {proportion!r}")
        elif (proportion > 0) != bool(slots):
            self._problems.append(f"replay_proportion={proportion} and replay_slots={slots!r} go together; give both or none")

    def _check_replay_level(self) -> None:
        """Options of shards between collection and gradients."""
        options, num_shards = self._options, self._options["num_replay_workers"]
        for name, low in (("num_replay_workers", 1), ("learning_starts", 0)):
            if options[name] is not None:
                self._parse(name, partial(check_count, name, low=low))
        self._parse("add_in_flight", partial(check_count, "add_in_flight"))
        if options["routing"] not in ROUTINGS:
            self._problems.append(f"routing must be one of {', '.join(ROUTINGS)}, got {options['routing']!r}")
        if options["kind"] not in (None, *REPLAY_KINDS):
            self._problems.append(f"kind must be one of {', '.join(REPLAY_KINDS)}, or None, got {options['kind']!r}")
        if not isinstance(options["replay_debug"], bool):
            self._problems.append(f"replay_debug must be True or False, got {options['replay_debug']!r}")
        if options["prioritized"] is not None and not isinstance(options["prioritized"], bool):
            self._problems.append(f"prioritized must be True, False or None, got {options['prioritized']!r}")
        for name in _RATIOS:
            value = options[name]
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf):
                self._problems.append(f"{name} must be a number > 0 or None, got {value!r}")
        self._check_resources("replay_worker_resources")
        if self._problems:
            return
        low, high = (options[name] for name in _RATIOS)
        asynchronous = options["col_communication"] is ASYNC
        self._problems += [text for wrong, text in (
            *((num_shards is None, f"{name}={options[name]} is for a replay level; give num_replay_workers, or "
               + ("the algorithm's start_steps in its place" if name == "learning_starts" else "leave it out"))
              for name in self._changed(_REPLAY_ONLY)),
            *((num_shards is not None, f"{name}={options[name]} is for items of a queue; with num_replay_workers there is none")
              for name in self._changed(_QUEUE_ONLY)),
            (num_shards is not None and not asynchronous,
             "num_replay_workers needs col_communication='asynchronous': shards are filled beside learning"),
            (num_shards == 1 and dict(options["replay_worker_resources"]) != FREE,
             "replay_worker_resources is for remote shards; num_replay_workers=1 is a thread of the learner's process"),
            (num_shards is not None and (options["record"] is not None or options["replay"] is not None),
             "a run with num_replay_workers cannot be recorded or replayed; leave one of them out"),
            (None not in (low, high) and low > high,
             f"min_replay_ratio {low} exceeds max_replay_ratio {high}; collection and learning would wait for each other"),
        ) if wrong]

    def _replay_level(self, algo: Any, storage: Any, train_envs: Any) -> None:
        """Refuse shards that nothing can be drawn from; settle what is left to the algorithm."""
        options, num_shards = self._options, self._options["num_replay_workers"]
        is_kept = given_kind(storage).is_kept
        if is_kept or num_shards is not None:
            keeper = storage.cls.__name__ if is_kept else "replay"
            for name in self._changed(_NOT_WITH_REPLAY):
                raise ConfigError(f"{name}={options[name]} is for rollouts that are used and forgotten; {keeper} keeps and draws "
                                  "them, so leave it out")
        if num_shards is None:
            return
        options["kind"] = check_kind(options["kind"], storage, options["size"])
        self._check_priorities(storage)
        size = storage.options.size if is_kept else options["size"]
        own, rollout = size // num_shards, rollout_steps(storage, train_envs.num_envs)
        if options["train_batch_size"] is None:
            options["train_batch_size"] = getattr(algo.options, "mini_batch_size", rollout) if is_kept else rollout
        if options["learning_starts"] is None:  # else the first batches would be the same few rollouts over and over
            options["learning_starts"] = getattr(algo.options, "start_steps", 0) if is_kept else options["train_batch_size"]
        options["prefetch"] = options["prefetch"] or _PREFETCH
        for wrong, text in (
                (own < options["train_batch_size"] and given_kind(storage) is not DataKind.SEQUENCES,
                 f"size {size} over {num_shards} shards is {own} each, less than train_batch_size {options['train_batch_size']}"),
                (own < rollout, f"a shard must hold a rollout of {rollout} steps, size {size} over {num_shards} shards is {own} each"),
                (options["learning_starts"] > size, f"learning_starts {options['learning_starts']} exceeds size {size}")):
            if wrong:
                raise ConfigError(f"{text}; raise size")

    def _check_sequences(self, storage: Any, train_envs: Any) -> None:
        """Refuse replay in which no sequence would ever be complete; the steps of a worker stay together.

        Sequences of whole rollouts are complete as they come.
        """
        options = self._options
        if kind_of(storage) != "sequence":
            return
        num_shards = options["num_replay_workers"] or 1
        storage.cls.check_size(storage.options, train_envs.num_envs, -(-options["num_col_workers"] // num_shards),
                               storage.options.size // num_shards)
        if options["routing"] in TORN_BY:
            raise ConfigError(f"routing={options['routing']!r} would split sequences that span several rollouts over different shards; "
                              "leave it out")
        if options["num_replay_workers"] is not None:
            options["routing"] = "by_stream"

    def _check_priorities(self, storage: Any) -> None:
        """Refuse priorities that nothing would set."""
        by_worker = self._options["initial_priority"] == "worker"
        if by_worker and given_kind(storage) is DataKind.SEQUENCES:
            raise ConfigError(f"initial_priority='worker' is for single transitions; {storage.cls.__name__} draws sequences, so "
                              "leave it out")
        if by_worker and storage.cls is MultiAgentReplay:
            raise ConfigError("initial_priority='worker' is not for several policies, whose transitions begin with the largest priority "
                              "that was seen; leave it out")
        if by_worker and not storage.cls.has_priorities:
            raise ConfigError(f"initial_priority='worker' needs a storage with priorities, such as PERBuffer, got "
                              f"{storage.cls.__name__}")

    def _check_runtime(self) -> None:
        runtime = self._options["runtime"]
        if runtime is not None and runtime not in RUNTIMES:
            self._problems.append(f"runtime must be one of {list(RUNTIMES)}, got {runtime!r}")
        elif runtime in ("threads", "simulated") and self._options["address"] is not None:
            self._problems.append(f"address is that of a Ray cluster; runtime={runtime!r} uses none")
        if self._options["placement"] not in (None, "colocate"):
            self._problems.append(f"placement must be None or 'colocate', got {self._options['placement']!r}")
        elif self._options["placement"] is not None and runtime in ("threads", "simulated"):
            self._problems.append(f"placement chooses nodes of a Ray cluster; with runtime={runtime!r} there is nothing to place")
        self._parse("schedule_seed", check_seed)
        if runtime != "simulated" and (self._options["schedule_seed"] != 0 or self._options["costs"] is not None):
            self._problems.append("schedule_seed and costs are for runtime='simulated'; another would ignore them")
        elif self._options["costs"] is not None:
            self._parse("costs", lambda costs: Costs(costs, 0) and costs)
        self._check_record()
        if self._options["faults"] is not None:
            self._parse("faults", _check_faults)

    def _check_record(self) -> None:
        options = self._options
        for name in ("record", "replay"):
            if options[name] is not None:
                self._parse(name, partial(_check_path, name))
        if options["replay"] is None:
            return
        if options["record"] is not None:
            self._problems.append("record and replay are for one run each; leave one out")
        if options["runtime"] not in (None, "simulated"):
            self._problems.append(f"replay runs in the simulated runtime, wherever the record was made; leave out "
                                  f"runtime={options['runtime']!r}")
        for name in ("schedule_seed", "costs", "placement"):
            if options[name]:
                self._problems.append(f"{name} would be ignored: the order of events is that of the replayed record")
        options["runtime"] = "simulated"

    def _check_resources(self, name: str) -> None:
        resources = self._options[name]
        if not isinstance(resources, Mapping):
            self._problems.append(f"{name} must be a mapping such as {{'num_cpus': 1}}, got {resources!r}")
            return
        for key, amount in resources.items():
            if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 <= amount < math.inf:
                self._problems.append(f"{name}[{key!r}] must be a number >= 0, got {amount!r}")
            elif key not in _RESOURCES and difflib.get_close_matches(str(key), _RESOURCES, n=1):
                near = difflib.get_close_matches(str(key), _RESOURCES, n=1)[0]
                self._problems.append(f"{name} has {key!r}; did you mean {near!r}?")
            elif key == "num_gpus" and amount > 1 and amount != int(amount):
                self._problems.append(f"{name}['num_gpus'] must be a share up to 1 or a whole number, got {amount!r}")

    def _derive_execution(self, level: str) -> None:
        name, count = f"{level}_execution", self._options[f"num_{level}_workers"]
        if self._options[name] is None:
            self._options[name] = PARALLEL if count > 1 else CENTRAL
            return
        self._parse(name, Execution)
        if self._options[name] is PARALLEL and count == 1:
            self._problems.append(
                f"{name}='Parallel' contradicts num_{level}_workers=1, which means no remote worker; give 2 or more")
        elif self._options[name] is CENTRAL and count > 1:
            self._problems.append(
                f"{name}='Central' contradicts num_{level}_workers={count}; give 1, or leave {name} out")

    def _contradictions(self) -> None:
        """Options that would be ignored, or that ask for two things at once."""
        options = self._options
        async_col, async_grad = options["col_communication"] is ASYNC, options["grad_communication"] is ASYNC
        parallel_col, parallel_grad = options["col_execution"] is PARALLEL, options["grad_execution"] is PARALLEL
        remote_shards = (options["num_replay_workers"] or 0) > 1
        has_remote = parallel_col or parallel_grad or remote_shards
        fraction, distribute = options["col_fraction_workers"] < 1.0, options["distribute_gradients"]
        compress = {kind: options[f"compress_{kind}_to_send"] for kind in KINDS}
        self._problems += [text for wrong, text in (
            *((not async_col,
               f"{name}={options[name]} is for col_communication='asynchronous'; synchronous collection would ignore it")
              for name in self._changed(_ASYNC_ONLY)),
            *((not (async_grad and parallel_grad),
               f"{name}={options[name]!r} is for grad_communication='asynchronous' with num_grad_workers >= 2; other "
               "gradients would ignore it") for name in self._changed(_ASYNC_GRADS_ONLY)),
            (options["aggregate"] > options["num_grad_workers"] and async_grad and parallel_grad,
             f"aggregate must be 1 ... num_grad_workers ({options['num_grad_workers']}), got {options['aggregate']}"),
            *((not parallel and dict(options[name]) != dict(DEFAULT_RESOURCES),
               f"{name} is for remote workers, of which there are none; give num_{name[:name.index('_')]}_workers >= 2")
              for name, parallel in (("col_worker_resources", parallel_col), ("grad_worker_resources", parallel_grad))),
            (options["address"] is not None and not has_remote,
             "address is that of a Ray cluster; a scheme without remote workers uses none"),
            (options["placement"] is not None and not (parallel_grad and (parallel_col or remote_shards)),
             "placement='colocate' keeps gradient workers with their own workers; give num_grad_workers >= 2 and num_col_workers "
             "(or num_replay_workers) >= 2, or leave it out"),
            (not has_remote and options["runtime"] != "simulated" and _kills(options["faults"]),
             "faults kill a worker, but there is no remote one; a thread cannot be killed"),
            (options["runtime"] == "threads" and _kills(options["faults"]),
             "faults kill a worker, but a thread cannot be killed; give runtime='ray' or runtime='simulated'"),
            (options["col_num_threads"] is not None and not (parallel_col and options["runtime"] == "ray"),
             f"col_num_threads={options['col_num_threads']} is for collection workers with processes of their own; give "
             "num_col_workers >= 2 on Ray"),
            (options["ramp"] is not None and options["buffer"] == "circular",
             f"ramp={options['ramp']} is for buffer='ring'; buffer='circular' would ignore it"),
            (options["on_policy_lag"] == "wait" and options["max_policy_lag"] is None,
             "on_policy_lag='wait' needs max_policy_lag, got None"),
            (options["on_policy_lag"] == "wait" and (options["broadcast_interval"], options["max_weight_sync_delay"]) != (1, None),
             "on_policy_lag='wait' counts from the newest weights; leave out broadcast_interval and max_weight_sync_delay"),
            (options["on_policy_lag"] == "wait" and options["buffer"] == "circular",
             "on_policy_lag='wait' counts uses to come, which buffer='circular' does not know; give on_policy_lag='drop'"),
            (options["max_weight_sync_delay"] is not None and options["broadcast_interval"] != 1,
             "max_weight_sync_delay takes the place of broadcast_interval; give one of them"),
            (fraction and async_col,
             "col_fraction_workers < 1 ends synchronous rounds early; col_communication='asynchronous' has none"),
            (not fraction and bool(self._changed(["fraction_samples"])),
             f"fraction_samples={options['fraction_samples']} needs col_fraction_workers < 1: nobody is told to stop otherwise"),
            (distribute and not parallel_grad, "distribute_gradients=True needs num_grad_workers >= 2"),
            (distribute and async_grad,
             "distribute_gradients=True contradicts grad_communication='asynchronous': ranks average together"),
            (distribute and self._compresses[GRADS],
             f"compress_grads_to_send={compress[GRADS]!r} contradicts distribute_gradients=True: ranks sum them in float32, and none "
             "is sent"),
            (self._compresses[GRADS] and not parallel_grad,
             f"compress_grads_to_send={compress[GRADS]!r} needs num_grad_workers >= 2: central gradients are not sent"),
            (self._compresses[DATA] and not parallel_col,
             f"compress_data_to_send={compress[DATA]!r} needs num_col_workers >= 2: the local worker's rollouts are not sent"),
            (self._compresses[WEIGHTS] and not parallel_col and (distribute or not parallel_grad),
             f"compress_weights_to_send={compress[WEIGHTS]!r} needs num_col_workers >= 2, or num_grad_workers >= 2 that do not "
             "average among themselves: nobody is sent weights otherwise"),
        ) if wrong]
        if fraction and not async_col and not parallel_col and not distribute:
            self.warnings.append("col_fraction_workers < 1 has no effect with num_col_workers=1")

    def _check_microbatches(self) -> None:
        options = self._options
        for name in ("train_batch_size", "microbatch_size"):
            if options[name] is not None:
                self._parse(name, partial(check_count, name))
        prefetch, norm_over, has_shards = options["prefetch"], options["norm_over"], options["num_replay_workers"] is not None
        if prefetch is not None and has_shards:
            self._parse("prefetch", partial(check_count, "prefetch"))
        elif prefetch is not None and (isinstance(prefetch, bool) or prefetch not in (0, 1)):
            self._problems.append(f"prefetch must be 0, 1 or None, got {prefetch!r}")
        if norm_over not in _NORM_OVER:
            self._problems.append(f"norm_over must be one of {list(_NORM_OVER)}, got {norm_over!r}")
        self._raise()
        train, micro = options["train_batch_size"], options["microbatch_size"]
        asynchronous = options["col_communication"] is ASYNC
        by_pieces = train is not None and micro is not None and not asynchronous
        self._problems += [text for wrong, text in (
            (train is not None and micro is not None and micro > train,
             f"microbatch_size must not exceed train_batch_size, got {micro} > {train}"),
            *((given and not by_pieces,
               f"{text} is for synchronous collection by pieces; give train_batch_size and microbatch_size, or leave it out")
              for text, given in ((f"prefetch={prefetch}", prefetch is not None and not has_shards),
                                  (f"norm_over={norm_over!r}", norm_over != _NORM_OVER[0]))),
            (prefetch == 1 and not has_shards and options["col_execution"] is CENTRAL,
             "prefetch=1 needs num_col_workers >= 2: the local worker collects in the learner's own time"),
            (prefetch == 1 and options["col_fraction_workers"] < 1.0,
             "prefetch=1 contradicts col_fraction_workers < 1: nobody looks who is slow while a gradient is computed"),
        ) if wrong]

    def microbatches(self, algo: Any) -> None:
        """Refuse what would keep an algorithm from forgetting microbatches though asked to; settle what is left open."""
        options = self._options
        if options["num_replay_workers"] is not None:
            return
        norm_over, prefetch = options["norm_over"], options["prefetch"]
        reason = why_all_is_kept(algo.options, norm_over)
        if norm_over == "microbatch" and reason:
            raise ConfigError(f"norm_over='microbatch' contradicts {algo.cls.__name__}: {reason}; set num_epochs=1 and "
                              "num_mini_batch=1, or norm_over='batch'")
        if prefetch == 1 and reason:
            raise ConfigError(f"prefetch=1 has nothing to overlap: the train batch is complete before it is differentiated, "
                              f"because {reason}; leave prefetch out")
        if norm_over == "microbatch" and getattr(algo.options, "advantage_normalization", "none") == "none":
            self.warnings.append(f"norm_over='microbatch' has no effect with {algo.cls.__name__}, which normalises nothing")
        may = (options["train_batch_size"] is not None and options["microbatch_size"] is not None and not reason
               and options["col_execution"] is PARALLEL and options["col_fraction_workers"] == 1.0)
        options["prefetch"] = int(may) if prefetch is None else prefetch

    def agent(self, algo: Any, actor: Any, storage: Any, train_envs: Any, test_envs: Any) -> None:
        """Refuse parts that are no factories, that do not fit together, or that cannot travel."""
        parts = {"algo_factory": (algo, Algorithm, "PPO"), "actor_factory": (actor, nn.Module, "OnPolicyActor"),
                 "storage_factory": (storage, Storage, "GAEBuffer"), "train_envs_factory": (train_envs, VecEnv, "VecEnv")}
        if test_envs is not None:
            parts["test_envs_factory"] = (test_envs, VecEnv, "VecEnv")
        for name, (factory, kind, example) in parts.items():
            if not isinstance(factory, Factory) or not issubclass(factory.cls, kind):
                raise FactoryError(f"{name} must be a factory such as {example}.create_factory(...), got {factory!r}")
        self._policies(algo, actor, storage, train_envs)
        check_fit(algo, actor, storage, train_envs.num_envs)
        _check_actor_fits(actor, train_envs)
        if test_envs is not None:
            for what in ("observation_space", "action_space"):
                ours, theirs = getattr(train_envs, what), getattr(test_envs, what)
                if ours != theirs:
                    raise SpaceError(f"{what} differs: training environments have {ours}, test environments {theirs}")
        self._check_sequences(storage, train_envs)
        self._replay_level(algo, storage, train_envs)
        self._check_batch(algo, storage, train_envs)
        self._check_precision(algo)
        if PARALLEL in (self._options["col_execution"], self._options["grad_execution"]) \
                and self._options["runtime"] == "ray":
            for name, (factory, *_) in parts.items():
                size = _check_travels(name, factory)
                if size > _LARGE_BYTES:
                    self.warnings.append(f"{name} is {size / 2**20:.0f} MB pickled, which every worker is sent; load "
                                         "large data inside the function")

    def _policies(self, algo: Any, actor: Any, storage: Any, train_envs: Any) -> None:
        """Refuse parts of several policies beside parts of one, or of others."""
        policies = {name: tuple(getattr(factory.options, "policies", ())) for name, factory in (
            ("algo_factory", algo), ("actor_factory", actor), ("storage_factory", storage))}
        policies["train_envs_factory"] = tuple(getattr(train_envs.options, "agents", ()))
        if len(set(policies.values())) > 1:
            shown = ", ".join(f"{name} {list(own) if own else 'none'}" for name, own in policies.items())
            raise ConfigError(f"all parts must have the same policies, got {shown}; make them with multi_agent(...)")
        if (self._options["num_replay_workers"] or 0) > 1 and any(
                getattr(factory.options, "weight_norm", None) == "buffer" for factory in getattr(storage.options, "policies", {}).values()):
            raise ConfigError("weight_norm='buffer' of several policies needs one shard, which knows all that could be drawn; give "
                              "num_replay_workers=1 or weight_norm='batch'")

    def _check_precision(self, algo: Any) -> None:
        if (getattr(algo.options, "mixed_precision", False) and self._options["device"] == "cpu"
                and torch.backends.cpu.get_cpu_capability() == "AVX2"):
            self.warnings.append("mixed_precision=True on a processor without AVX-512, which computes bfloat16 several "
                                 "times slower than float32; leave it out")

    def _check_batch(self, algo: Any, storage: Any, train_envs: Any) -> None:
        size, num_envs = getattr(storage.options, "size", None), train_envs.num_envs
        if given_kind(storage).is_kept:
            return
        if size is None:
            return
        asynchronous = self._options["col_communication"] is ASYNC
        workers = 1 if asynchronous else self._options["num_col_workers"]
        batch = size * num_envs * workers
        wanted, slots = self._options["train_batch_size"] or 0, self._options["replay_slots"]
        name = "num_mini_batch" if getattr(algo.options, "mini_batch_size", None) is None else "mini_batch_size"
        if (parts := getattr(algo.options, name, 1)) > max(batch, wanted):
            raise ConfigError(f"{name} must not exceed the batch: batch {batch} = {workers} collection workers "
                              f"x {num_envs} environments x {size} steps, {name} {parts}")
        if slots and slots * batch <= (wanted or batch):
            raise ConfigError(f"replay_slots {slots} · rollout {batch} = {slots * batch} must exceed train_batch_size "
                              f"{wanted or batch}")


def check_scheme(scheme: Any) -> Any:
    """Return `scheme`; raise `ConfigError` unless it has the settings of a scheme, which a factory lacks."""
    if not hasattr(scheme, "settings"):
        raise ConfigError(f"scheme must be a Scheme, such as Scheme(algorithm, actor, storage, envs), got {scheme!r}")
    return scheme


def _check_path(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str) or not os.fspath(value):
        raise ConfigError(f"{name} must be the path of a file or None, got {value!r}")
    return os.path.abspath(os.path.expanduser(os.fspath(value)))


def _check_faults(text: Any) -> str:
    if not isinstance(text, str):
        raise ConfigError(f"faults must be text such as 'kill col.1 @ step 100', got {text!r}")
    return FaultPlan(text, 0).text


def _kills(faults: str | None) -> bool:
    return faults is not None and any(fault.action == "kill" for fault in FaultPlan(faults, 0).faults)


def _check_actor_fits(actor: Any, envs: Any) -> None:
    """Raise `SpaceError` if the actor was made for environments with other leaves, shapes or kinds of actions."""
    for what in ("observation_space", "action_space"):
        ours, theirs = getattr(actor.options, what, None), getattr(envs, what)
        if ours is not None and _layout(ours) != _layout(theirs):
            raise SpaceError(f"actor_factory was made for {what} {ours}, train_envs_factory has {theirs}; give the "
                             f"actor that of the environments")


def _layout(space: Any) -> Any:
    if isinstance(space, Mapping):
        return {leaf: _layout(part) for leaf, part in space.items()}
    return type(space), space.shape, str(getattr(space, "n", None)), str(getattr(space, "nvec", None))


def _check_travels(name: str, factory: Any) -> int:
    """Bytes of the factory pickled; raises `FactorySerializationError` naming the option that cannot be."""
    import cloudpickle

    try:
        size = len(cloudpickle.dumps(factory))
    except Exception as error:
        names = getattr(type(factory.options), "__dataclass_fields__", {})
        culprits = [key for key in names if not _pickles(getattr(factory.options, key))]
        raise FactorySerializationError(
            f"{name} cannot be sent to a worker: {', '.join(culprits) or 'it'} cannot be pickled ({error}); "
            "make locks, files and tensors on a device inside the function, not outside") from error
    if size > 512 * 2**20:
        raise FactorySerializationError(f"{name} is {size / 2**20:.0f} MB pickled; at most 512 MB can be sent. "
                                        "Load large data inside the function")
    return size


def _pickles(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever a user's class raises when it is pickled
        return False
    return True
