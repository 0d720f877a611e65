"""Audit rows that any trainer has logged: how old its data are, and what each correction for lag would do with them.

A row is one sequence, as a JSON object on a line; see `FIELDS`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pytorchrl.agent.algorithms.corrections import CORRECTIONS, DEFAULT_CLIP, CorrectionOptions, Steps
from pytorchrl.errors import ConfigError

FIELDS: Mapping[str, tuple[str, ...]] = {
    "trainer_logprobs": ("per_token_logps", "log_probs", "action_log_probs"),
    "inference_logprobs": ("sampling_per_token_logps", "rollout_log_probs", "rollout_logprobs", "behavior_logprobs"),
    "old_logprobs": ("old_per_token_logps", "old_log_probs", "prox_logp"),
    "advantages": ("advantage",),
    "mask": ("loss_mask", "completion_mask", "response_mask", "action_mask", "loss_masks"),
    "versions": ("weight_versions", "version_per_token"),
    "end_version": (),
    "version": ("trainer_version", "step"),
}
"""The fields of a row, each with the names that other trainers give it; other fields are ignored.

- `trainer_logprobs` and `inference_logprobs`: log-probabilities of the tokens, by the trainer and by the generator.
- `old_logprobs` (optional): those by the trainer's weights before its first update with the row. They stand for
  `trainer_logprobs` if these are missing.
- `advantages`: one number, or one for each token.
- `mask` (optional): 1 for tokens that are trained on, else 0.
- `versions` (optional): versions of the weights that drew the tokens, or one for all.
- `end_version` (optional): the trainer's version when the row arrived.
- `version` (optional): the trainer's version when it used the row. Rows of the same version are one batch.
"""
_NEEDED, _ENDS = ("trainer_logprobs", "inference_logprobs", "advantages"), ("end_version", "version")
_LOGPROBS = ("trainer_logprobs", "inference_logprobs", "old_logprobs")
_ROUNDING = 1e-3  # of log-probabilities, which may be above 0 by so much
LIMITS: Mapping[str, float] = {"effective_sample_size": 0.5, "kl": 0.1, "mismatch": 0.02, "left_out": 0.2}
"""Bounds of the diagnostics: a smaller effective sample size, or a larger other value, is an alarm."""


class LoggedSequence(NamedTuple):
    """A sequence of L tokens that are trained on."""

    logp: np.ndarray
    """(L,) float64, log-probabilities by the trainer."""
    behavior: np.ndarray
    """(L,) float64, log-probabilities by the generator."""
    proximal: np.ndarray
    """(L,) float64, log-probabilities before the first update; those of the trainer if they are unknown."""
    advantage: np.ndarray
    """(L,) float64."""
    versions: np.ndarray | None
    """(L,) int64, versions of the weights that drew the tokens."""
    end_version: int | None
    version: int | None


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        rows, tokens, batches: Numbers of sequences, of tokens that are trained on, and of batches.
        lags: Cause ("generation", "queue", "total") -> `mean`, `p50`, `p90`, `max` over tokens; causes whose versions
            are unknown are missing.
        diagnostics: `effective_sample_size` (the smallest of all batches), `kl` of the trainer from the generator (mean
            of r - 1 - log r), and `mismatch`, the mean of abs(log r) of tokens without lag (missing if there are none).
        corrections: Correction -> `cut`, the share of tokens that are clipped, truncated or left out;
            `without_gradient`, the share of tokens that have no gradient; and `weight`, the mean factor of the gradient
            of log pi * A.
        alarms: Texts of the diagnostics that are outside of `LIMITS`.
    """

    rows: int
    tokens: int
    batches: int
    lags: Mapping[str, Mapping[str, float]]
    diagnostics: Mapping[str, float]
    corrections: Mapping[str, Mapping[str, float]]
    alarms: Sequence[str]


def read_rows(path: Path) -> list[LoggedSequence]:
    """Return the rows of a file of JSON lines.

    Raises:
        ConfigError: The file cannot be read, contains no rows, or a row is wrong; the message names the line and the
            field.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a text in a row may contain other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    rows = [_row(line, f"{path.name}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ConfigError(f"{str(path)!r} contains no rows; write a JSON object for each sequence on a line")
    return rows


def _row(line: str, where: str) -> LoggedSequence:
    given = _fields(line, where)
    logprobs = given["trainer_logprobs"]
    size = len(logprobs[1]) if isinstance(logprobs[1], list) else 0
    if not size:
        raise ConfigError(f"{where}: {logprobs[0]!r} must be a list with a number for each token, got "
                          f"{logprobs[1]!r:.40}")
    mask = np.ones(size)
    if "mask" in given:
        mask = _numbers(where, *given["mask"], used=mask)
    if len(wrong := mask[~np.isin(mask, (0.0, 1.0))]):
        raise ConfigError(f"{where}: {given['mask'][0]!r} must consist of 0 and 1, got {wrong[0]}")
    values = {field: _numbers(where, *named, used=mask, is_single=field in ("advantages", "versions"))
              for field, named in given.items() if field not in (*_ENDS, "mask")}
    for field in (name for name in _LOGPROBS if name in values):
        if values[field].max() > _ROUNDING:
            raise ConfigError(f"{where}: {given[field][0]!r} must be at most 0, because they are logarithms of "
                              f"probabilities, got {values[field].max()}")
    ends = {field: _version(where, *given[field]) for field in _ENDS if field in given}
    versions = values.get("versions")
    if versions is not None:
        _check_versions(where, given["versions"][0], versions, ends)
    used = mask.astype(bool)
    return LoggedSequence(
        values["trainer_logprobs"][used], values["inference_logprobs"][used],
        values.get("old_logprobs", values["trainer_logprobs"])[used], values["advantages"][used],
        None if versions is None else versions[used].astype(np.int64), ends.get("end_version"), ends.get("version"))


def _fields(line: str, where: str) -> dict[str, tuple[str, object]]:
    """Return the fields of a row, each with the name that the row gives it."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: expected a JSON object, got {line[:40]!r}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {type(found).__name__}")
    given: dict[str, tuple[str, object]] = {}
    for field, others in FIELDS.items():
        names = [name for name in (field, *others) if found.get(name) is not None]
        if len(names) > 1:
            raise ConfigError(f"{where}: {' and '.join(names)} are names of the same field; leave all but one out")
        if names:
            given[field] = names[0], found[names[0]]
    if "trainer_logprobs" not in given and "old_logprobs" in given:
        given["trainer_logprobs"] = given["old_logprobs"]
    for field in _NEEDED:
        if field not in given:
            raise ConfigError(
                f"{where}: {field!r} is missing (also accepted: {' or '.join(map(repr, FIELDS[field]))})")
    return given


def _numbers(where: str, name: str, value: object, *, used: np.ndarray, is_single: bool = False) -> np.ndarray:
    """Return a finite number for each token, (size,) float64; 0 for those that are not used.

    Args:
        where: Place of the row.
        name: Name of the field.
        value: Its value.
        used: (size,), 0 for tokens that are not used, whose values may be anything.
        is_single: Whether a single number stands for all tokens.
    """
    size = len(used)
    if is_single and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = [value] * size
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {name!r} must be {'a number, or ' if is_single else ''}a list with a number for "
                          f"each token, got {value!r:.40}")
    if len(value) != size:
        raise ConfigError(f"{where}: {name!r} has {len(value)} numbers, but there are {size} tokens")
    value = [item if is_used else 0.0 for item, is_used in zip(value, used.tolist(), strict=True)]
    if wrong := [item for item in value if not isinstance(item, (int, float)) or not math.isfinite(item)]:
        raise ConfigError(f"{where}: {name!r} must consist of finite numbers, got {wrong[0]!r:.40}")
    return np.array(value, np.float64)


def _version(where: str, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{where}: {name!r} must be a whole number >= 0, got {value!r:.40}")
    return value


def _check_versions(where: str, name: str, versions: np.ndarray, ends: Mapping[str, int]) -> None:
    """Raise `ConfigError` if versions of tokens are not whole numbers, or newer than those of their use."""
    if (versions != np.floor(versions)).any() or versions.min() < 0:
        raise ConfigError(f"{where}: {name!r} must be whole numbers >= 0, got {versions.tolist()!r:.40}")
    newest, limit = int(versions.max()), min(ends.values(), default=None)
    if limit is not None and newest > limit:
        raise ConfigError(f"{where}: {name!r} contains {newest}, which is newer than the trainer's version {limit}")
    if ends.get("end_version", 0) > ends.get("version", math.inf):
        raise ConfigError(f"{where}: 'end_version' {ends['end_version']} is newer than 'version' {ends['version']}")


def audit(rows: Iterable[LoggedSequence]) -> Audit:
    """Compute the lags of rows, their diagnostics, and what each correction would do with them.

    Raises:
        ConfigError: The masks leave out all tokens.
    """
    rows = list(rows)
    batches = defaultdict(list)
    for row in rows:
        if len(row.logp):
            batches[row.version].append(row)
    if not batches:
        raise ConfigError("the masks leave out all tokens; at least one must be 1, for a token that is trained on")
    lags = {cause: _summary(np.concatenate(found)) for cause, found in _lags(rows).items()}
    sizes, kls, effects = [], [], defaultdict[str, list[_Effect]](list)
    for batch in batches.values():
        steps = _steps(batch)
        log_ratio = steps.log_ratio.detach()[steps.valid]
        weights = (log_ratio - log_ratio.max()).exp()  # the largest is 1, so that none is infinite
        sizes.append(float(weights.sum() ** 2 / weights.square().sum() / len(weights)))
        kls.append(log_ratio.exp() - 1 - log_ratio)
        for name in CORRECTIONS:
            effects[name].append(_effect(name, steps))
    kl = torch.cat(kls)
    diagnostics = {"effective_sample_size": min(sizes), "kl": float(kl.mean())}
    fresh = np.concatenate([np.zeros(0), *(
        np.abs(row.logp - row.behavior)[row.versions == row.version] for row in rows if row.versions is not None)])
    if len(fresh):
        diagnostics["mismatch"] = float(fresh.mean())
    corrections = {name: _shares([sum(parts) for parts in zip(*found, strict=True)]) for name, found in effects.items()}
    alarms = list(_alarms(diagnostics, corrections))
    return Audit(len(rows), len(kl), len(batches), lags, diagnostics, corrections, alarms)


def _lags(rows: Iterable[LoggedSequence]) -> dict[str, list[np.ndarray]]:
    """Return the lag of each token, by cause."""
    found = defaultdict[str, list[np.ndarray]](list)
    for row in rows:
        if row.versions is None:
            continue
        if row.end_version is not None:
            found["generation"].append(row.end_version - row.versions)
        if row.end_version is not None and row.version is not None:
            found["queue"].append(np.full(len(row.versions), row.version - row.end_version))
        if row.version is not None:
            found["total"].append(row.version - row.versions)
    return found


def _summary(lags: np.ndarray) -> dict[str, float]:
    if not len(lags):
        return {"mean": 0.0, "p50": 0.0, "p90": 0.0, "max": 0.0}
    p50, p90 = np.quantile(lags, (0.5, 0.9), method="inverted_cdf").tolist()
    return {"mean": float(lags.mean()), "p50": p50, "p90": p90, "max": float(lags.max())}


def _steps(rows: Sequence[LoggedSequence]) -> Steps:
    """Return the tokens of a batch as padded sequences (L, B)."""
    length = max(len(row.logp) for row in rows)

    def padded(columns: Iterable[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack([np.pad(column, (0, length - len(column))) for column in columns], 1))

    lags = [np.zeros(len(row.logp)) if row.versions is None or row.version is None else row.version - row.versions
            for row in rows]
    return Steps.of(
        padded(row.logp for row in rows).requires_grad_(), padded(row.behavior for row in rows),
        padded(row.advantage for row in rows), padded(np.ones(len(row.logp)) for row in rows).bool(),
        proximal=padded(row.proximal for row in rows), lag=padded(lags).long())


_Effect = tuple[float, float, float, float, float]
"""Numbers of tokens: all of them, those that a correction cuts, those with an advantage, and those of these without a
gradient; and the sum of the weights of those with an advantage."""


def _effect(name: str, steps: Steps) -> _Effect:
    """Return what a correction does with a batch.

    The weight of a token is the derivative of the surrogate by its log pi, divided by its advantage. Corrections of
    whole sequences have one weight for all tokens of a sequence, so the mean advantage of the sequence replaces that of
    each token.
    """
    valid = steps.valid
    assert valid is not None
    if CORRECTIONS[name].of_sequence:
        mean = steps.over_sequence(steps.advantage) / steps.over_sequence(torch.ones_like(steps.advantage))
        steps = steps._replace(advantage=mean)
    surrogate, is_cut = CorrectionOptions(correction=name).corrected(steps, DEFAULT_CLIP)
    gradient, = torch.autograd.grad(surrogate[valid].sum(), steps.logp, retain_graph=True)
    counted = valid & (steps.advantage != 0)
    weights = (gradient / steps.advantage)[counted]
    return (float(valid.sum()), float(is_cut[valid].sum()), float(len(weights)),
            float((weights == 0).sum()), float(weights.sum()))


def _shares(effect: Sequence[float]) -> dict[str, float]:
    """Return the entry of `Audit.corrections` for the sum of `_Effect` over all batches."""
    tokens, cut, counted, without, weight = effect
    counted = max(counted, 1.0)
    return {"cut": cut / tokens, "without_gradient": without / counted, "weight": weight / counted}


def _alarms(diagnostics: Mapping[str, float], corrections: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    size, limits = diagnostics["effective_sample_size"], LIMITS
    if not size >= limits["effective_sample_size"]:  # also NaN
        yield (f"effective sample size {size:.2f} of a batch is below {limits['effective_sample_size']}: few tokens "
               "determine its gradient")
    if not diagnostics["kl"] <= limits["kl"]:
        yield f"KL divergence {diagnostics['kl']:.3f} of the trainer from the generator is above {limits['kl']}"
    if not diagnostics.get("mismatch", 0.0) <= limits["mismatch"]:
        yield (f"tokens without lag have log-probabilities that differ by {diagnostics['mismatch']:.3f} on average: "
               "trainer and generator compute different policies")
    if (share := corrections["ppo"]["without_gradient"]) > limits["left_out"]:
        yield f"PPO would ignore {share:.0%} of the tokens, because it clips their ratio"
