"""Choose the precision in which networks compute; with `mixed_precision="auto"`, measure which one is faster.

Whether bfloat16 is faster depends on the processor, the networks and the batch size. The trial therefore builds the
networks of the agent, and measures how long the gradient of a batch takes in each precision. The batch has the size of
the batches in training, but its observations are all-zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

import torch

from pytorchrl.agent.contracts import NUM_EXAMPLES
from pytorchrl.agent.data import Obs
from pytorchrl.agent.options import Options, PartFactory, option

if TYPE_CHECKING:
    from pytorchrl.agent.factories import ActorFactory, AlgorithmFactory

F = TypeVar("F", bound=PartFactory[object])

AUTO = "auto"
"""Value of `mixed_precision` with which a scheme measures which precision is faster (see `measure`), and of `compile`
with which a scheme decides by a rule whether to compile (see `agent.algorithms.compile_rule`)."""
CHOSEN = ("mixed_precision", "compile")
"""The options whose value "auto" a scheme replaces when it starts."""
Choices = Mapping[str, Mapping[str, bool]]
"""For each option of `CHOSEN`, the value of each policy; if the agent has only one policy, its name is `""`."""

# A gradient is computed in both precisions, alternately, for TRIAL_S seconds, but at least three times.
TRIAL_S, _LEAST_PAIRS = 0.3, 3
# bfloat16 is chosen only if its time is below this share of float32's time. A smaller difference is often noise, and
# noise could make two equal runs choose different precisions.
_LARGEST_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(Options):
    """The options of all algorithms whose networks can compute in bfloat16 and can be compiled."""

    mixed_precision: bool | str = option(
        False, choices=(False, True, AUTO),
        help="Run networks in bfloat16; parameters stay float32. With auto, the scheme measures once, when it starts, "
             "whether a gradient is faster in bfloat16; an algorithm without a scheme then computes in float32.")
    compile: bool | str = option(
        AUTO, choices=(False, True, AUTO),
        help="Compile losses and gradients into one graph at the first updates, which takes up to a minute and needs a "
             "C++ compiler. With auto, the scheme compiles if the run makes so many updates that this saves time; an "
             "algorithm without a scheme is then not compiled.")

    @property
    def is_mixed(self) -> bool:
        """Whether networks compute in bfloat16.

        If `mixed_precision` is "auto", the value is False until a scheme replaces "auto" with the faster choice.
        """
        return self.mixed_precision is True

    @property
    def is_compiled(self) -> bool:
        """Whether losses are compiled; False for "auto" until a scheme replaces it."""
        return self.compile is True


def precision(device: torch.device, is_mixed: bool) -> AbstractContextManager[object]:
    """Return a context in which networks on `device` compute in bfloat16 if `is_mixed` is set, otherwise in float32.

    Even with `is_mixed`, only matrix products and convolutions are computed in bfloat16.
    """
    # Entering a disabled `torch.autocast` would take as long as the computation of a small layer.
    return torch.autocast(device.type, torch.bfloat16) if is_mixed else nullcontext()


class BatchShape(NamedTuple):
    """The shape of a batch from which one gradient is computed."""

    columns: int
    """B, number of sequences or, for an actor without memory, of samples."""
    length: int = 1
    """L, steps of a sequence; 1 for an actor without memory."""


class PrecisionTrial(NamedTuple):
    """The shortest time of a gradient in each precision, in seconds."""

    float32_s: float
    bfloat16_s: float

    @property
    def is_mixed(self) -> bool:
        """Whether the time of a gradient in bfloat16 is below 0.9 times its time in float32."""
        return self.bfloat16_s < _LARGEST_SHARE * self.float32_s

    def __str__(self) -> str:
        """Return a text for logs: the chosen precision, and the times that explain the choice."""
        chosen = "bfloat16" if self.is_mixed else "float32"
        return (f"networks compute in {chosen}, because a gradient takes {1e3 * self.float32_s:.3g} ms in float32 and "
                f"{1e3 * self.bfloat16_s:.3g} ms in bfloat16")


class Measurable(Protocol):
    """The methods of an algorithm that the trial calls."""

    def example_batch(self, shape: BatchShape) -> object:
        """Return a batch of this shape."""

    def compute_gradients(self, batch: object) -> object:
        """Compute the gradient of a batch."""


def policies_of(factory: F) -> Mapping[str, F]:
    """Return the factories of all policies, by name; if the agent has only one policy, its name is `""`."""
    return getattr(factory.options, "policies", None) or {"": factory}


def choices_of(algorithm: PartFactory[object]) -> dict[str, dict[str, bool]]:
    """Return the options of `CHOSEN` of each policy, without those that a policy lacks or that are still "auto"."""
    found = {name: {policy: getattr(own.options, name, None) for policy, own in policies_of(algorithm).items()}
             for name in CHOSEN}
    return {name: {policy: value for policy, value in values.items() if isinstance(value, bool)}
            for name, values in found.items()}


def is_compiled(algorithm: PartFactory[object]) -> bool:
    """Return whether the losses of a policy are compiled."""
    return any(getattr(own.options, "is_compiled", False) for own in policies_of(algorithm).values())


def undecided(algorithm: PartFactory[object], name: str) -> list[str]:
    """Return the names of the policies whose option `name` is "auto"."""
    return [policy for policy, own in policies_of(algorithm).items() if getattr(own.options, name, None) == AUTO]


def with_choices(algorithm: F, choices: Choices) -> F:
    """Return the factory with each "auto" of `CHOSEN` replaced by the value of the policy in `choices`, if any."""
    changes: dict[str, dict[str, object]] = {}
    for name, values in choices.items():
        for policy in undecided(algorithm, name):
            if policy in values:
                changes.setdefault(policy, {})[name] = values[policy]
    if not changes:
        return algorithm
    changed = {policy: policies_of(algorithm)[policy].with_options(**own) for policy, own in changes.items()}
    if "" in changed:
        return changed[""]
    return algorithm.with_options(policies={**policies_of(algorithm), **changed})


def measure(algorithm: AlgorithmFactory, actor: ActorFactory, shape: BatchShape, device: str) -> PrecisionTrial:
    """Measure the time of one gradient in each precision, for an algorithm with one policy.

    Args:
        algorithm: Factory of the algorithm.
        actor: Factory of the actor.
        shape: Shape of the batch.
        device: Device that computes the gradients.
    """
    def gradient(is_mixed: bool) -> Callable[[], object]:
        # The trial does not compile the losses: compilation takes up to a minute, and does not speed up the matrix
        # products, which take most of the time.
        own = algorithm.with_options(mixed_precision=is_mixed, compile=False)
        built = cast("Measurable", own(actor=actor(device=device, seed=0), seed=0, device=device))
        batch = built.example_batch(shape)
        return lambda: built.compute_gradients(batch)

    return compare(gradient(False), gradient(True))


def compare(
    float32: Callable[[], object], bfloat16: Callable[[], object], clock: Callable[[], float] = time.perf_counter,
) -> PrecisionTrial:
    """Call two functions alternately, and return the shortest time of each.

    The first call of each function is ignored, because it is often slower than later calls.
    """
    def seconds(function: Callable[[], object]) -> float:
        start = clock()
        function()
        return clock() - start

    start, pairs = clock(), [(seconds(float32), seconds(bfloat16))]
    while len(pairs) <= _LEAST_PAIRS or clock() - start < TRIAL_S:
        pairs.append((seconds(float32), seconds(bfloat16)))
    return PrecisionTrial(*map(min, zip(*pairs[1:], strict=True)))


def example_rows(example: Obs, count: int) -> Obs:
    """Return a batch of `count` observations, by repeating the rows of an actor's `example_obs()`."""
    return {name: leaf[torch.arange(count, device=leaf.device) % NUM_EXAMPLES] for name, leaf in example.items()}
