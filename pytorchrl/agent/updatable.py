"""Parameters of a part that may change while training: numbers, or schedules that follow the experiment's env steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pytorchrl.agent.options import Schedule


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
        """Set an option; a number ends its schedule, a `Schedule` starts one.

        Raises:
            KeyError: There is no such option, or it is fixed.
            ConfigError: The value is not allowed; nothing was changed.
        """
        names = self.updatable
        if name not in names:
            raise KeyError(f"{type(self).__name__} cannot update {name!r}; it can {', '.join(names) or 'nothing'}")
        self.options = dataclasses.replace(self.options, **{name: value})
        self._set_parameter(name, value)

    def _set_parameter(self, name: str, value: float | Schedule | None) -> None:
        # New dictionaries, so that a thread that reads the old ones never sees half a change.
        schedules = {other: schedule for other, schedule in self.schedules.items() if other != name}
        parameters = {other: number for other, number in self.parameters.items() if other != name}
        if isinstance(value, Schedule):
            schedules[name], parameters[name] = value, value.start
        elif value is not None:
            parameters[name] = float(value)
        self.schedules, self.parameters = schedules, parameters

    def _schedules_state(self) -> dict[str, Any]:
        """The schedules as plain values; `_load_schedules` reads them."""
        return {name: dataclasses.asdict(schedule) for name, schedule in self.schedules.items()}

    def _load_schedules(self, state: Mapping[str, Any]) -> None:
        self.schedules = {name: Schedule(**schedule) for name, schedule in state.items()}
