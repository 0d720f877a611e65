"""Parameters of a part that may change while training: numbers, or schedules that follow the experiment's env steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pytorchrl.agent.schedules import Computed, Schedule, schedule_of
from pytorchrl.errors import ConfigError, WeightsError


class Updatable:
    """A part of an agent, some of whose options are declared `updatable`."""

    options: Any
    schedules: Mapping[str, Schedule] = MappingProxyType({})
    """Name -> schedule, of those parameters that change with env steps."""
    parameters: Mapping[str, float] = MappingProxyType({})
    """Name -> value in force; an option that is None has none."""

    def follow_schedules(self, env_steps: int, target_steps: int) -> dict[str, float]:
        """Set each scheduled parameter to its value after `env_steps` of the whole experiment; returns those set."""
        values = {name: schedule.value(env_steps, target_steps) for name, schedule in self.schedules.items()}
        if values:
            self.parameters = {**self.parameters, **values}
        return values

    @property
    def updatable(self) -> list[str]:
        """Names of options that may change while training."""
        return [field.name for field in dataclasses.fields(self.options) if field.metadata.get("updatable")]

    def _start_parameters(self) -> None:
        """Begin with what the options say."""
        for name in self.updatable:
            self._set_parameter(name, getattr(self.options, name))

    def _update_option(self, name: str, value: Any) -> None:
        """Set an option; a number ends its schedule, a `Schedule` or a list of points (env step, value) starts one.

        Raises:
            KeyError: There is no such option, or it is fixed.
            ConfigError: The value is not allowed, or is a function; nothing was changed.
        """
        names = self.updatable
        if name not in names:
            raise KeyError(f"{type(self).__name__} cannot update {name!r}; it can {', '.join(names) or 'nothing'}")
        options = dataclasses.replace(self.options, **{name: value})
        value = getattr(options, name)
        refuse_function(value)
        self.options = options
        self._set_parameter(name, value)

    def _set_parameter(self, name: str, value: float | Schedule | None) -> None:
        # New dictionaries, so that a thread that reads the old ones never sees half a change.
        schedules = {other: schedule for other, schedule in self.schedules.items() if other != name}
        parameters = {other: number for other, number in self.parameters.items() if other != name}
        if isinstance(value, Schedule):
            schedules[name], parameters[name] = value, value.value(0, 1)
        elif value is not None:
            parameters[name] = float(value)
        self.schedules, self.parameters = schedules, parameters

    def _schedules_state(self) -> dict[str, Any]:
        """Return the schedules as plain values; `_load_schedules` reads them."""
        return {name: schedule.parts() for name, schedule in self.schedules.items()}

    def _load_schedules(self, state: Mapping[str, Any]) -> None:
        """Follow the schedules of a state.

        Raises `WeightsError` where one is a function that the options do not have.
        """
        self.schedules = {name: self._restored(name, parts) for name, parts in state.items()}

    def _restored(self, name: str, parts: Sequence[Any]) -> Schedule:
        own = getattr(self.options, name, None)
        if isinstance(own, Computed) and own.parts() == list(parts):
            return own
        if parts[0] == Computed.NAME:
            raise WeightsError(f"the state has the function {parts[1]} as schedule of {name}, the options have "
                               f"{own!r}; give the same")
        return schedule_of(parts)


def refuse_function(value: Any) -> None:
    """Raise `ConfigError` for a function that is to become a schedule while training."""
    if isinstance(value, Computed):
        raise ConfigError(
            f"{value.option} cannot become a function while training, for no checkpoint or record could keep "
            f"{value!r}; give a "
            "schedule made of numbers, such as linear(1e-3, 0.0) or [(0, 1e-3), (1000000, 0.0)], or the function as "
            "option from the start")
