"""Schemes that have a name of their own in the literature: settings of the one tree, and what must not contradict them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytorchrl.agent.options import Factory
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.base.worker import ASYNC, SYNC

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
        off_policyness: What the algorithm may declare: "on", "corrected" or "any".
    """

    name: str
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any]
    least: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    off_policyness: tuple[str, ...] = ("on", "corrected", "any")

    def settings(self, algo_factory: Factory[Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of `Scheme`, those `given` among them.

        Raises:
            ConfigError: One of them contradicts the name, or the algorithm cannot learn so; all problems at once.
        """
        problems = [f"{self.name} means {name}={_shown(value)}, got {_shown(given[name])}; leave it out, or build a plain Scheme"
                    for name, value in self.fixed.items() if name in given and given[name] != value]
        settings = {**self.defaults, **given, **self.fixed}
        problems += [f"{why}: {name}={settings[name]} is too few, give {low} or more"
                     for name, (low, why) in self.least.items() if isinstance(settings[name], int) and settings[name] < low]
        # What is no factory is refused by the scheme itself.
        if isinstance(algo_factory, Factory):
            found = getattr(algo_factory.cls, "off_policyness", None)
            if found not in self.off_policyness:
                problems.append(f"{self.name} needs an algorithm whose off_policyness is {' or '.join(map(repr, self.off_policyness))}"
                                f", that of {algo_factory.cls.__name__} is {found!r}")
        if problems:
            raise ConfigError("; ".join(problems))
        return settings


def _shown(value: Any) -> str:
    return repr(str(value)) if isinstance(value, str) else repr(value)


_NO_REMOTE_WORKER = "asynchronous gradients need a remote worker, and num_grad_workers=1 means none"

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in (
    Preset(
        name="a3c",
        fixed={"col_communication": SYNC, "grad_communication": ASYNC, "distribute_gradients": False},
        defaults={"num_grad_workers": 2, "updates_per_step": 100, "aggregate": 1, "max_grad_lag": None, "lag_policy": "apply"},
        least={"num_grad_workers": (2, _NO_REMOTE_WORKER)}),
    Preset(
        name="ddppo",
        fixed={"col_communication": SYNC, "grad_communication": SYNC, "distribute_gradients": True},
        defaults={"num_grad_workers": 2, "num_col_workers": 2, "col_fraction_workers": 0.6, "fraction_samples": 0.25},
        least={"num_grad_workers": (2, "ranks average among themselves")}),
)}


class NamedSchemes:
    """A constructor for each name; what it returns is an ordinary scheme, and printing it shows every setting."""

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

        The share of workers that ends a round is that of a gradient worker's own collection workers.

        Args:
            algo_factory: Makes the algorithm.
            actor_factory: Makes the actor.
            storage_factory: Makes the storage.
            train_envs_factory: Makes each collection worker's environments.
            test_envs_factory: Makes the evaluation's environments; None: no evaluation.
            **settings: `num_grad_workers=2`, `num_col_workers=2`, `col_fraction_workers=0.6`, `fraction_samples=0.25`, and
                any other setting of `Scheme`.

        Raises:
            ConfigError: A setting is wrong, or contradicts decentralised gradients.
        """
        return cls(algo_factory, actor_factory, storage_factory, train_envs_factory, test_envs_factory,  # type: ignore[call-arg]
                   **PRESETS["ddppo"].settings(algo_factory, settings))
