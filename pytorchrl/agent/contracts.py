"""Check the values that methods of a user's classes return. B = samples of a batch, E = environments.

For each part of an agent, only the first batch and the first step are checked. Networks are checked once, after they
are built. Every rollout is checked, because this check is cheap. `DataCheck`, `check_gradients` and `check_state` are
for `check_data="always"` only. Each error names the class, the method, the returned value and the expected value.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.data import (
    OBS_LEAF,
    ActingStep,
    Batch,
    DataKind,
    Evaluated,
    ReplayBatch,
    RolloutData,
    SequenceBatch,
)
from pytorchrl.errors import ConfigError, ContractError
from pytorchrl.support.untyped import UserPart

B = TypeVar("B")


def violation(part: object, method: str, got: str, expected: str) -> ContractError:
    """Return the error for a method of `part` that returned `got` instead of `expected`."""
    return ContractError(f"{type(part).__name__}.{method} returned {got}; expected {expected}")


# Algorithms


def check_terms(
    algorithm: object, returned: object, like: Tensor, weights: Mapping[str, float],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Check the result of an on-policy algorithm's `terms` for its first batch.

    Args:
        algorithm: The algorithm.
        returned: Result of the method. It should be two dictionaries: the terms of the loss by name, and the measures,
            which are statistics that are only logged, by name.
        like: Log-probabilities of the batch, (B,), or (L, B) for sequences of length L. Terms and measures must have
            the same shape and dtype.
        weights: Weight of each term, by name.

    Returns:
        The names of the terms, in the order of `weights`, and the names of the measures.

    Raises:
        ContractError: Names, shapes or types are wrong.
    """
    expected = "two dictionaries, name -> term of the loss and name -> measure that is only logged"
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise violation(algorithm, "terms()", _described(returned), expected)
    terms, measures = returned
    if not isinstance(terms, Mapping) or not isinstance(measures, Mapping):
        raise violation(algorithm, "terms()", f"{_described(terms)} and {_described(measures)}", expected)
    if terms.keys() != weights.keys():
        name = type(algorithm).__name__
        raise ContractError(
            f"{name}.terms() returned the terms {sorted(terms)} and {name}.loss_weights() returned weights of "
            f"{sorted(weights)}; return the same names from both: begin with the results of super() and add your own "
            "names to each")
    if twice := sorted((terms.keys() & measures.keys()) | ({"loss"} & {*terms, *measures})):
        raise violation(algorithm, "terms()", f"the duplicate name {', '.join(twice)} ('loss' is the sum of all terms)",
                        "a different name for each term and measure")
    for name, value in [*terms.items(), *measures.items()]:
        _check_tensor(algorithm, "terms()", name, value, like.shape, like.dtype,
                      "one number for each sample; the algorithm itself takes the mean over valid samples")
    if like.requires_grad and not any(term.requires_grad for term in terms.values()):
        raise violation(algorithm, "terms()", "terms without a gradient",
                        "at least one term that is computed from `evaluated` or from parameters of the actor")
    return tuple(weights), tuple(measures)


def check_weights(algorithm: object, weights: object) -> None:
    """Raise `ContractError` unless `loss_weights` of an algorithm returned a mapping from names to finite numbers."""
    if not isinstance(weights, Mapping) or not all(_is_number(weight) for weight in weights.values()):
        raise violation(algorithm, "loss_weights()", repr(weights), "a dictionary, name of a term -> finite number")


def check_per_sample(part: object, method: str, value: object, like: Tensor, meaning: str = "one number") -> None:
    """Raise `ContractError` unless a method returned a floating-point tensor with the shape of `like`.

    The error says that the tensor contains `meaning` for each sample.
    """
    _check_tensor(part, method, "", value, like.shape, None, f"{meaning} for each sample")


def check_target_groups(algorithm: UserPart, networks: Mapping[str, object]) -> None:
    """Raise `ContractError` if `target_groups` of a replay algorithm names a group that has no network in the actor.

    Args:
        algorithm: The algorithm.
        networks: The actor's network for each parameter group.
    """
    if unknown := [name for name in algorithm.target_groups if name not in networks]:
        raise ContractError(f"{type(algorithm).__name__}.target_groups names {', '.join(map(repr, unknown))}; "
                            f"expected groups of {type(algorithm.actor).__name__}.networks(), which are "
                            f"{sorted(networks)}")


def check_losses(algorithm: UserPart, returned: object, batch: ReplayBatch | SequenceBatch) -> None:
    """Check the result of a replay algorithm's `losses` for its first batch.

    Args:
        algorithm: The algorithm.
        returned: Result of the method.
        batch: The batch; the TD errors must have the shape of `batch.ret`, (B,), or (L, B) for sequences of length L.

    Raises:
        ContractError: Names, shapes or types are wrong.
    """
    expected = "three values: group -> loss, name -> measure that is only logged, and the absolute TD errors"
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise violation(algorithm, "losses()", _described(returned), expected)
    losses, measures, errors = returned
    if not isinstance(losses, Mapping) or not isinstance(measures, Mapping):
        raise violation(algorithm, "losses()", f"{_described(losses)} and {_described(measures)}", expected)
    if not losses or losses.keys() - algorithm.groups.keys():
        raise violation(algorithm, "losses()", f"losses of the groups {sorted(losses)}",
                        f"a loss for groups of `trained_parameters()`, which are {sorted(algorithm.groups)}")
    taken = {"loss", "errors", *(f"loss_{name}" for name in losses)}
    if twice := sorted(taken & measures.keys()):
        raise violation(algorithm, "losses()", f"measures named {', '.join(twice)}",
                        f"names other than {', '.join(sorted(taken))}, which `info` uses for losses and errors")
    for name, value in [*losses.items(), *measures.items()]:
        _check_tensor(algorithm, "losses()", name, value, torch.Size(()), None, "the mean over the batch")
    for name, loss in losses.items():
        if not loss.requires_grad:
            raise violation(algorithm, "losses()", f"{name!r} without a gradient",
                            f"a loss that is computed from parameters of group {name!r}")
    _check_tensor(algorithm, "losses()", "errors", errors, batch.ret.shape, None,
                  "the absolute TD error of each sample")


def check_choice(algorithm: object, action: object, num_envs: int) -> None:
    """Raise `ContractError` unless `choose` of a replay algorithm returned a tensor with one row per environment."""
    if not isinstance(action, Tensor) or action.shape[:1] != (num_envs,):
        raise violation(algorithm, "choose()", _described(action),
                        f"a tensor of shape ({num_envs}, ...), one row for each environment")


def check_acting_step(algorithm: object, acting: object, num_envs: int) -> None:
    """Raise `ContractError` unless `acting_step` returned an `ActingStep` with one row for each environment."""
    method = "acting_step()"
    if not isinstance(acting, ActingStep):
        raise violation(algorithm, method, _described(acting), "an ActingStep")
    for name, row in [("action", acting.action), ("clipped_action", acting.clipped_action), *acting.other.items(),
                      *acting.rhs.items()]:
        if not isinstance(row, np.ndarray) or row.shape[:1] != (num_envs,):
            raise violation(algorithm, method, f"{name!r} as {_described(row)}",
                            f"an array of shape ({num_envs}, ...), one row for each environment")


# Actors

NUM_EXAMPLES = 3
"""Number of all-zero observations on which a network is tested."""


def overrides(part: object, base: type, *methods: str) -> bool:
    """Return whether the class of `part` overrides at least one of the `methods` of `base`."""
    return any(getattr(type(part), method) is not getattr(base, method) for method in methods)


@contextmanager
def reading(actor: UserPart, names: Sequence[str]) -> Iterator[None]:
    """Refuse options that the user set, but that the networks built in the `with` block do not use.

    An option counts as used if the block reads it. If the block reads `feature_extractor`, no option except
    `obs_groups` is refused, because the block then builds networks of this library, and it is normal that some of them
    ignore some options.

    Args:
        actor: The actor whose options are watched.
        names: Names of the options that only networks read.

    Raises:
        ConfigError: An option differs from its default and was not read.
    """
    options, read = actor.options, set()
    kind = type(options)

    class Watched(kind):  # type: ignore[misc,valid-type] # `kind` is known only at run time
        def __getattribute__(self, name: str) -> object:
            read.add(name)
            return super().__getattribute__(name)

    actor.options = watched = copy.copy(options)
    object.__setattr__(watched, "__class__", Watched)  # a frozen dataclass refuses assignment
    try:
        yield
    finally:
        object.__setattr__(watched, "__class__", kind)  # networks may keep this object, so stop watching it
        actor.options = options
    if "__dict__" in read:  # vars(options) reads `__dict__`, which contains all options
        return
    if "feature_extractor" in read:
        names = [name for name in names if name == "obs_groups"]
    fields = {field.name: field for field in dataclasses.fields(options)}
    unread = [f"{name}={getattr(options, name)!r}" for name in names if name in fields and name not in read
              and getattr(options, name) != fields[name].default]
    if unread:
        raise ConfigError(f"{type(actor).__name__}.build_networks() does not read {', '.join(unread)}, which would "
                          "have no effect; leave it out, or use it to build the networks")


def check_attributes(part: object, **meanings: str) -> None:
    """Raise `ContractError` unless `build_networks` of an actor has set each attribute in `meanings` to a module.

    `meanings` maps the name of each attribute to a description of the module, which the error message shows.
    """
    for name, meaning in meanings.items():
        found = getattr(part, name, None)
        if not isinstance(found, torch.nn.Module):
            raise ContractError(f"{type(part).__name__}.build_networks() set {name} to {_described(found)}; "
                                f"expected {meaning}")


def check_features(actor: object, method: str, returned: object, rhs: Mapping[str, Tensor]) -> Tensor:
    """Check the result of `policy_features` or `value_features` for `NUM_EXAMPLES` observations; return the features.

    Raises:
        ContractError: The result is not a pair of features (`NUM_EXAMPLES`, F) and memory states, or a memory state
            has another name or shape than in `rhs`, the initial memory states.
    """
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise violation(actor, method, _described(returned),
                        "features and the next state of the memory ({} without memory)")
    features, states = returned
    if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != NUM_EXAMPLES:
        raise violation(actor, method, f"features as {_described(features)}",
                        f"a tensor of shape ({NUM_EXAMPLES}, F) for {NUM_EXAMPLES} observations")
    for name, state in states.items():
        if name not in rhs or state.shape != rhs[name].shape:
            wanted = {name: tuple(state.shape) for name, state in rhs.items()}
            raise violation(actor, method, f"the memory {name!r} as {_described(state)}",
                            f"states with the names and shapes of initial_states(), {wanted}")
    return features


def check_output(actor: object, network: str, output: object, *sizes: int | None) -> None:
    """Raise `ContractError` unless a network returned a float tensor of the right shape for all-zero observations.

    The shape must be (`NUM_EXAMPLES`, *`sizes`), without the sizes that are None.
    """
    shape = (NUM_EXAMPLES, *(size for size in sizes if size is not None))
    if not isinstance(output, Tensor) or tuple(output.shape) != shape or not output.is_floating_point():
        raise violation(actor, network, _described(output),
                        f"a tensor of shape {shape} for {NUM_EXAMPLES} observations")


def check_evaluated(actor: object, evaluated: object, batch: Batch) -> None:
    """Raise `ContractError` unless an actor's `evaluate_all` returned an `Evaluated` with one number per sample."""
    if not isinstance(evaluated, Evaluated):
        raise violation(actor, "evaluate_all()", _described(evaluated), "an Evaluated")
    for name in ("logp", "entropy", "value"):
        _check_tensor(actor, "evaluate_all()", name, getattr(evaluated, name), batch.logp.shape, batch.logp.dtype,
                      "one number for each sample")


# Storages


def check_first_batch(storage: object, batches: Iterator[B]) -> Iterator[B]:
    """Yield the batches of an on-policy storage; raise `ContractError` if the first batch is not valid."""
    if not isinstance(batches, Iterable):
        raise violation(storage, "generate_batches()", _described(batches), "an iterator of Batch")
    for number, batch in enumerate(batches):
        if not number:
            _check_batch(storage, batch)
        yield batch


def _check_batch(storage: object, batch: object) -> None:
    method = "generate_batches()"
    if not isinstance(batch, Batch):
        raise violation(storage, method, _described(batch), "an iterator of Batch")
    _check_num_samples(storage, batch, batch.done.numel() if batch.valid is None else int(batch.valid.sum()))
    for name in ("logp", "value", "ret", "advantage"):
        _check_tensor(storage, method, name, getattr(batch, name), batch.done.shape, torch.float32,
                      "one number for each sample, like `done`")


def _check_num_samples(storage: object, batch: Batch | ReplayBatch | SequenceBatch, num_valid: int) -> None:
    if batch.num_samples != num_valid:
        raise _bad_batch(storage)(f"a batch with num_samples={batch.num_samples}",
                                  f"the number of its valid samples, {num_valid}")


def _bad_batch(storage: object) -> Callable[[str, str], ContractError]:
    """Return a function that makes an error of the storage from what it returned and what was expected."""
    return functools.partial(violation, storage, "generate_batches()")


_FLOAT, _INT, _BOOL = (torch.float32,), (torch.int64,), (torch.bool,)
# Field of a batch -> its axes and its allowed dtypes; () allows any dtype, which depends on the space. An
# axis with an upper-case name has the same size in all fields; "..." stands for any number of further axes.
_Fields = Mapping[str, tuple[str, tuple[torch.dtype, ...]]]
_SAMPLES: _Fields = {  # of a `Batch`, without an axis L for actors with memory
    "obs": ("B ...", ()), "done": ("B", _BOOL), "rhs": ("B h", _FLOAT), "mask": ("B n", _BOOL),
    "action": ("B ...", _INT + _FLOAT), "valid": ("B", _BOOL), "logp": ("B", _FLOAT), "value": ("B", _FLOAT),
    "ret": ("B", _FLOAT), "advantage": ("B", _FLOAT)}
_TRANSITIONS: _Fields = {
    "ids": ("B", _INT), "obs": ("B ...", ()), "action": ("B ...", _INT + _FLOAT), "ret": ("B", _FLOAT),
    "discount": ("B", _FLOAT), "next_obs": ("B ...", ()), "weight": ("B", _FLOAT), "mask": ("B n", _BOOL),
    "next_mask": ("B n", _BOOL)}
_SEQUENCES: _Fields = {  # R = W + L + n, the number of rows of a sequence; see `SequenceBatch`
    "ids": ("B", _INT), "obs": ("R B ...", ()), "done": ("R B", _BOOL), "rhs": ("B h", _FLOAT),
    "action": ("L B ...", _INT + _FLOAT),
    "ret": ("L B", _FLOAT), "discount": ("L B", _FLOAT), "next_row": ("L B", _INT), "valid": ("L B", _BOOL),
    "weight": ("B", _FLOAT), "mask": ("R B n", _BOOL), "previous": ("R B p", _FLOAT)}


def _check_replay_batch(storage: object, batch: ReplayBatch | SequenceBatch) -> None:
    """Check the dtypes and shapes that `ReplayBatch` or `SequenceBatch` documents, and the number of samples."""
    _check_fields(batch, _TRANSITIONS if isinstance(batch, ReplayBatch) else _SEQUENCES, _bad_batch(storage))
    _check_num_samples(storage, batch, len(batch.ids) if isinstance(batch, ReplayBatch) else int(batch.valid.sum()))


def _check_fields(batch: Batch | ReplayBatch | SequenceBatch, fields: _Fields,
                  error: Callable[[str, str], Exception]) -> None:
    """Check the tensors of a batch; raise `error(got, expected)` for a wrong one."""
    sizes: dict[str, int] = {}
    optional = _optional_fields(type(batch))
    for field, (axes, dtypes) in fields.items():
        value = getattr(batch, field)
        if value is None and field in optional:
            continue
        items = {f"{field}/{leaf}": item for leaf, item in value.items()} if isinstance(value, Mapping) else {
            field: value}
        for name, item in items.items():
            _check_axes(error, name, item, axes.split(), dtypes, sizes)


def _check_axes(error: Callable[[str, str], Exception], name: str, value: object, axes: Sequence[str],
                dtypes: Sequence[torch.dtype], sizes: dict[str, int]) -> None:
    """Raise `error(got, expected)` unless a tensor of a batch has these axes and one of these dtypes.

    `sizes` contains the sizes of the axes with upper-case names in the tensors so far, and this method adds new ones.
    """
    fixed = [axis for axis in axes if axis != "..."]
    if isinstance(value, Tensor):
        num_axes_fit = len(value.shape) == len(axes) or (len(fixed) < len(axes) and len(value.shape) >= len(fixed))
        own = dict(zip(fixed, value.shape, strict=False))
        if num_axes_fit and (not dtypes or value.dtype in dtypes) and all(
                sizes.setdefault(axis, size) == size for axis, size in own.items() if axis.isupper()):
            return
    wanted = ", ".join(str(sizes.get(axis, axis)) for axis in axes) + ("," if len(axes) == 1 else "")
    kinds = " or ".join(map(_plain, dtypes))
    raise error(f"{name!r} as {_described(value)}",
                f"a tensor of shape ({wanted})" + (f" and dtype {kinds}" if kinds else ""))


def _optional_fields(cls: type[Batch | ReplayBatch | SequenceBatch]) -> frozenset[str]:
    """Return the names of the fields of a class of batches that may be None."""
    return frozenset(field.name for field in dataclasses.fields(cls) if str(field.type).endswith("| None"))


def batch_of(kind: DataKind, fields: Mapping[str, object]) -> Batch | ReplayBatch | SequenceBatch:
    """Build a batch from a dictionary.

    Args:
        kind: The kind of data that the algorithm learns from.
        fields: The fields of `Batch`, `ReplayBatch` or `SequenceBatch`, depending on the kind, by name. Fields that
            may be None or have a default may be missing, and so may `rhs`. `num_samples` is then counted. Observations
            with a single leaf may be tensors instead of dictionaries.

    Returns:
        The batch, of the class that belongs to the kind.

    Raises:
        ConfigError: A field is unknown or missing, or has a wrong shape or dtype.
    """
    kinds: dict[DataKind, tuple[type[Batch | ReplayBatch | SequenceBatch], _Fields]] = {
        DataKind.TRANSITIONS: (ReplayBatch, _TRANSITIONS), DataKind.SEQUENCES: (SequenceBatch, _SEQUENCES)}
    cls, tensors = kinds.get(kind, (Batch, _SAMPLES))
    known = {field.name: field.default_factory if field.default is dataclasses.MISSING else field.default
             for field in dataclasses.fields(cls)}
    values: dict[str, object] = {**dict.fromkeys(_optional_fields(cls)), **({"rhs": {}} if "rhs" in known else {})}
    for name, value in fields.items():
        is_leaf = name in ("obs", "next_obs") and isinstance(value, Tensor)
        values[name] = {OBS_LEAF: value} if is_leaf else value
    missing = [name for name, default in known.items() if name not in values and default is dataclasses.MISSING]
    if missing or (unknown := [name for name in values if name not in known]):
        raise ConfigError(f"the batch of compute_gradients() {'lacks' if missing else 'has unknown fields:'} "
                          f"{', '.join(missing or unknown)}; the fields of {cls.__name__} are {', '.join(known)}")
    batch = cls(**values)  # type: ignore[arg-type] # `_check_fields` checks the values
    if cls is Batch and isinstance(batch.ret, Tensor) and batch.ret.dim() == 2:  # sequences, for actors with memory
        tensors = {name: (axes if name == "rhs" else f"L {axes}", dtypes) for name, (axes, dtypes) in tensors.items()}
    _check_fields(batch, tensors, lambda got, expected: ConfigError(
        f"compute_gradients() got {got}; expected {expected}"))
    if "num_samples" in fields:
        return batch
    valid = getattr(batch, "valid", None)
    return dataclasses.replace(batch, num_samples=batch.ret.numel() if valid is None else int(valid.sum()))


class DataCheck:
    """Check the data of a storage, and the gradients that are computed from them.

    A batch from replay must have the dtypes and shapes that its class documents, and so must the most important fields
    of an on-policy batch. All rollouts and batches must have the dtypes and shapes of the first ones: the number of
    axes of each tensor must stay the same, and so must its sizes after the axes of steps, environments and samples,
    whose lengths may change.
    """

    def __init__(self, storage: object) -> None:
        self._storage = storage
        self._first: dict[tuple[str, ...], tuple[torch.dtype, int, tuple[int, ...]]] = {}

    def check(self, method: str, data: object) -> None:
        """Raise `ContractError` if `data`, a result of the storage's `method`, has a wrong dtype or shape.

        Args:
            method: The method, such as "generate_batches()".
            data: A dataclass of tensors, of dictionaries of tensors, or of other such dataclasses: `RolloutData`,
                `Batch`, `ReplayBatch`, `SequenceBatch`, or the data of several policies.
        """
        self._check((method,), data, 2)

    def _check(self, path: tuple[str, ...], value: object, num_axes: int) -> None:
        if isinstance(value, Tensor):
            found = value.dtype, value.dim(), tuple(value.shape[num_axes:])
            first = self._first.setdefault(path, found)
            if found != first:
                dtype, dims, sizes = first
                raise violation(self._storage, path[0], f"{'/'.join(path[1:])!r} as {_described(value)}",
                                f"dtype {_plain(dtype)}, {dims} axes and the last sizes {sizes}, as at first")
        elif isinstance(value, Mapping):
            for name, item in value.items():
                self._check((*path, str(name)), item, num_axes)
        elif dataclasses.is_dataclass(value):
            if isinstance(value, Batch):
                _check_batch(self._storage, value)
                num_axes = value.done.dim()
            elif isinstance(value, (ReplayBatch, SequenceBatch)):
                _check_replay_batch(self._storage, value)
                num_axes = value.ret.dim()
            for field in dataclasses.fields(value):
                self._check((*path, field.name), getattr(value, field.name), num_axes)


def check_gradients(algorithm: UserPart, source: str, vectors: Sequence[object]) -> None:
    """Raise `ContractError` unless each gradient is a float32 vector of the right size, or None.

    Args:
        algorithm: The algorithm, which states the sizes of its gradients.
        source: The source of the gradients, such as "compute_gradients()", for the error message.
        vectors: The gradients: one for each parameter group or, with several policies, one for each policy.
    """
    sizes = algorithm.gradient_sizes
    if len(vectors) != len(sizes):
        raise violation(algorithm, source, f"{len(vectors)} gradients", f"{len(sizes)} gradients")
    for place, (vector, size) in enumerate(zip(vectors, sizes, strict=True)):
        if vector is not None:
            _check_tensor(algorithm, source, f"gradient {place}", vector, (size,), torch.float32,
                          "one number for each parameter")


def check_state(algorithm: object, method: str, state: Mapping[str, np.ndarray], own: Mapping[str, Tensor]) -> None:
    """Raise `ContractError` if an array of a state has another dtype than the worker's own tensor of that name.

    Args:
        algorithm: The algorithm, which copies the state and checks its names and shapes.
        method: The method that returned the state: "acting_state()" or "learning_state()".
        state: The state of the sender.
        own: The state of the receiver.
    """
    for name, array in state.items():
        if name in own and array.dtype != own[name].numpy().dtype:
            raise violation(algorithm, method, f"{name!r} as {_described(array)}",
                            f"dtype {_plain(own[name].dtype)}, as in the worker that receives it")


def check_estimate(storage: object, estimate: object, shape: Sequence[int]) -> None:
    """Raise `ContractError` unless `estimate` of a storage returned advantages and returns, both (T, E) float32."""
    if not isinstance(estimate, tuple) or len(estimate) != 2:
        raise violation(storage, "estimate()", _described(estimate), "advantages and returns, two arrays")
    for name, array in zip(("advantages", "returns"), estimate, strict=True):
        is_tensor = isinstance(array, Tensor) and not array.is_cpu  # of a rollout on a device
        dtype = torch.float32 if is_tensor else np.float32
        if (not isinstance(array, np.ndarray) and not is_tensor) or array.shape != tuple(shape) or array.dtype != dtype:
            raise violation(storage, "estimate()", f"{name} as {_described(array)}",
                            f"a numpy array of shape {tuple(shape)} and dtype float32 (.astype(np.float32) converts)")


def check_rollout(algorithm: object, rollout: RolloutData, needed: Sequence[str]) -> None:
    """Raise `ContractError` unless `finish_rollout` has added all entries named in `needed` to `rollout.other`."""
    if missing := [name for name in needed if name not in rollout.other]:
        raise violation(algorithm, "finish_rollout()", f"a rollout whose `other` has {sorted(rollout.other)}",
                        f"{', '.join(missing)} in it, too, because the storage needs them; call "
                        "super().finish_rollout(rollout)")


def check_draw(storage: object, drawn: object, count: int, drawable: np.ndarray) -> None:
    """Raise `ContractError` unless `draw` of a replay storage returned `count` drawable rows and their weights.

    Args:
        storage: The replay storage.
        drawn: The result of `draw`, which should be a pair: rows, (B,) integers, and weights, (B,) floats.
        count: B, the number of requested rows.
        drawable: (capacity,) bool, whether each row of the storage can be drawn.
    """
    if not isinstance(drawn, (tuple, list)) or len(drawn) != 2:
        raise violation(storage, "draw()", _described(drawn), "rows and weights, two arrays")
    rows, weights = drawn
    for name, array, kinds, kind in (("rows", rows, "iu", "whole"), ("weights", weights, "f", "real")):
        if not isinstance(array, np.ndarray) or array.shape != (count,) or array.dtype.kind not in kinds:
            raise violation(storage, "draw()", f"{name} as {_described(array)}",
                            f"a numpy array of shape ({count},) of {kind} numbers")
    if rows.min() < 0 or rows.max() >= len(drawable) or not drawable[rows].all():
        raise violation(storage, "draw()", "rows that cannot be drawn", "rows of `drawable_rows()`")


def _check_tensor(part: object, method: str, name: str, value: object, shape: Sequence[int], dtype: torch.dtype | None,
                  meaning: str) -> None:
    """Raise `ContractError` unless a value is a tensor with this shape and dtype (None: any float dtype)."""
    if not isinstance(value, Tensor) or value.shape != torch.Size(shape) or not (
            value.is_floating_point() if dtype is None else value.dtype == dtype):
        wanted = "a floating-point dtype" if dtype is None else f"dtype {_plain(dtype)}"
        raise violation(part, method, f"{name!r} as {_described(value)}" if name else _described(value),
                        f"a tensor of shape {tuple(shape)} and {wanted}: {meaning}")


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {_plain(value.dtype)}"
    if isinstance(value, np.ndarray):
        return f"a numpy array of shape {value.shape} and dtype {value.dtype}"
    if value is None or isinstance(value, (int, float, str)):
        return repr(value)
    return f"a {type(value).__name__}"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
