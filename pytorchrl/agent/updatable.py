"""Change options of an agent during training: set them to numbers, or let them follow schedules over env steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pytorchrl.agent.schedules import Computed, Schedule, schedule_of
from pytorchrl.errors import ConfigError, UnknownParameterError, WeightsError
from pytorchrl.support.untyped import OptionsOfSubclass


class Updatable:
    """Base class of algorithms and storages; their options declared as `updatable` may change during training."""

    options: OptionsOfSubclass
    """Checked options."""
    schedules: Mapping[str, Schedule] = MappingProxyType({})
    """Name -> schedule, for each parameter that changes with env steps."""
    parameters: Mapping[str, float] = MappingProxyType({})
    """Name -> current value; an option that is None has no entry."""

    def follow_schedules(self, env_steps: int, target_steps: int) -> dict[str, float]:
        """Set each scheduled parameter to its value after `env_steps` of `target_steps` steps; return these values."""
        values = {name: schedule.value(env_steps, target_steps) for name, schedule in self.schedules.items()}
        if values:
            self.parameters = {**self.parameters, **values}
        return values

    @property
    def updatable(self) -> list[str]:
        """Names of the options that may change during training."""
        return [field.name for field in dataclasses.fields(self.options) if field.metadata.get("updatable")]

    def _start_parameters(self) -> None:
        """Set `parameters` and `schedules` to the values of the updatable options."""
        for name in self.updatable:
            self._set_parameter(name, getattr(self.options, name))

    def _update_option(self, name: str, value: object) -> None:
        """Replace the number or schedule of an option by a new number or schedule.

        A schedule is a `Schedule` or a list of points (env step, value).

        Raises:
            UnknownParameterError: There is no such option, or it cannot change.
            ConfigError: The value is not allowed, or it is a function; the option keeps its previous value.
        """
        names = self.updatable
        if name not in names:
            raise UnknownParameterError(f"{type(self).__name__} cannot update {name!r}; it can update "
                                        f"{', '.join(names) or 'nothing'}")
        options = dataclasses.replace(self.options, **{name: value})
        checked = getattr(options, name)
        refuse_function(checked)
        self.options = options
        self._set_parameter(name, checked)

    def _set_parameter(self, name: str, value: float | Schedule | None) -> None:
        # Build new dictionaries, so that a thread that reads the previous dictionaries never sees a partial change.
        schedules = {other: schedule for other, schedule in self.schedules.items() if other != name}
        parameters = {other: number for other, number in self.parameters.items() if other != name}
        if isinstance(value, Schedule):
            schedules[name], parameters[name] = value, value.value(0, 1)
        elif value is not None:
            parameters[name] = float(value)
        self.schedules, self.parameters = schedules, parameters

    def _load_parameters(self, saved: Mapping[str, float]) -> None:
        """Restore saved parameters; raise `WeightsError` if they do not fit the options."""
        for name, value in saved.items():
            if not isinstance(value, (int, float)):
                raise WeightsError(f"the parameter {name} in the state is {value!r:.100}, not a number")
        for name in self.parameters.keys() - saved.keys():
            if not self._may_be_none(name):  # None values are not saved
                raise WeightsError(f"the state lacks the parameter {name}")
        self.parameters = dict(saved)

    def _may_be_none(self, name: str) -> bool:
        """Return whether None is an allowed value of a parameter."""
        declaration = self.options.declarations().get(name)
        return declaration is not None and not declaration.problem(None)

    def schedules_state(self) -> dict[str, list[str | float]]:
        """Return the schedules as plain values, for `load_schedules`."""
        return {name: schedule.parts() for name, schedule in self.schedules.items()}

    def load_schedules(self, state: Mapping[str, Sequence[str | float]]) -> None:
        """Restore the schedules that `schedules_state` returned.

        Raises:
            WeightsError: A saved schedule is a function, but the option is not set to the same function.
        """
        self.schedules = {name: self._restored(name, parts) for name, parts in state.items()}

    def _restored(self, name: str, parts: Sequence[str | float]) -> Schedule:
        own = getattr(self.options, name, None)
        if isinstance(own, Computed) and own.parts() == list(parts):
            return own
        if parts[0] == Computed.NAME:
            raise WeightsError(f"the state has the function {parts[1]} as schedule of {name}, the options have "
                               f"{own!r}; set the option to the same function")
        return schedule_of(parts)


def refuse_function(value: object) -> None:
    """Raise `ConfigError` if an option's new `value` is a function, which checkpoints and records cannot store."""
    if isinstance(value, Computed):
        raise ConfigError(
            f"{value.option} cannot become a function while training, because checkpoints and records cannot store "
            f"{value!r}; use a schedule of numbers, such as linear(1e-3, 0.0) or [(0, 1e-3), (1000000, 0.0)], "
            "or set the option to the function before training starts")
