"""Export the policies of a trained agent to files that work without this library."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pytorchrl.agent.acting import POLICY, Acting
from pytorchrl.agent.actors import DecoderActor
from pytorchrl.agent.env import EnvFactory
from pytorchrl.agent.policy import Policy
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.errors import ConfigError, ExportError
from pytorchrl.export.checks import Observed, compare, played_steps, random_steps
from pytorchrl.export.formats import Format, Traced, format_of, trace, write
from pytorchrl.support.numbers import check_whole

__all__ = ["Exported"]


@dataclass(frozen=True)
class Exported:
    """A file that was written, and the result of its check.

    Attributes:
        path: The file.
        policy: Name of the policy.
        num_observations: Number of observations for which the actions of the file and of the agent were compared.
        largest_difference: Largest absolute difference of the two actions; 0 for discrete actions.
    """

    path: Path
    policy: str
    num_observations: int
    largest_difference: float


def default_name(to: str) -> str:
    """Return the name that an exported file has by default; raise `ConfigError` for an unknown format."""
    return f"{POLICY}{format_of(to).suffix}"


class Exporter:
    """Object that writes the policies of an agent to files, and traces each policy only once.

    Args:
        acting: The policies of the agent.
        envs: Factory of the environments in which observations are collected to check the files.
        seed: Seed of the observations with which files are checked.
    """

    def __init__(self, acting: Acting, envs: EnvFactory, seed: int) -> None:
        self._acting, self._envs, self._seed = acting, envs, derive_seed(seed, Stream.EVALUATION)
        self._policies: dict[str, Policy] = {}
        self._traced: dict[str, Traced] = {}

    def export(self, path: Path, to: str, checks: int, overwrite: bool) -> tuple[Exported, ...]:
        """Write one file for each policy; see `TrainedAgent.export`.

        Raises:
            ConfigError: `checks` is below 1, a file exists and `overwrite` is false, or `path` cannot be written.
            ExportError: A policy is a decoder.
        """
        if any(issubclass(parts.actor.cls, DecoderActor) for parts in self._acting.parts.values()):
            raise ExportError("policies of DecoderActor cannot be exported, because torch.export does not support "
                              "their cache of keys and values with batches of any size; load the run with "
                              "pytorchrl.load, and let the agent act")
        form = format_of(to)
        checks = check_whole("checks", checks)
        paths = self._paths(path, form)
        if not overwrite and (existing := [str(own) for own in paths.values() if own.exists()]):
            raise ConfigError(f"{', '.join(existing)} exists already; choose another path, or set overwrite "
                              "(--overwrite)")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{str(path.parent)!r} cannot be written: {error}") from error
        observed = self._observe(checks)
        return tuple(self._write(policy, own, form, observed[policy]) for policy, own in paths.items())

    def _paths(self, path: Path, form: Format) -> dict[str, Path]:
        if list(self._acting.parts) == [POLICY]:
            return {POLICY: path}
        return {policy: path.with_name(f"{path.stem}-{policy}{path.suffix or form.suffix}")
                for policy in self._acting.parts}

    def _observe(self, checks: int) -> dict[str, list[Observed]]:
        """Return at least `checks` observations for each policy, with the agent's actions.

        About half of the observations come from played episodes; the others are random.
        """
        played = played_steps(self._acting.players, self._envs, (checks + 1) // 2, self._seed)
        return {
            policy: steps + random_steps(
                self._acting.players[policy], self._acting.parts[policy].seen_spaces,
                max(1, checks - sum(len(step.first) for step in steps)), self._seed)
            for policy, steps in played.items()}

    def _write(self, name: str, path: Path, form: Format, steps: list[Observed]) -> Exported:
        if name not in self._traced:
            self._policies[name] = self._acting.parts[name].policy()
            self._traced[name] = trace(name, self._policies[name])
        # The dot shows that the file has not been checked; the process id prevents a conflict with another export.
        partial = path.with_name(f".{path.stem}-{os.getpid()}{form.suffix}")
        try:
            partial.unlink(missing_ok=True)  # for example, a link
            found = compare(write(self._traced[name], form, partial), self._policies[name], steps)
            if found.num_different:
                raise ExportError(
                    f"{path} was not written: its actions differ from those of the agent for {found.num_different} of "
                    f"{found.num_observations} observations, by up to {found.largest_difference:.3g}; if an algorithm "
                    "of your own chooses actions in another way, define best_actions in its actor")
            partial.replace(path)
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be written: {error}") from error
        finally:
            partial.unlink(missing_ok=True)
        return Exported(path, name, found.num_observations, found.largest_difference)
