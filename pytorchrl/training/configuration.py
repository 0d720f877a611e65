"""Read and write configuration files: the algorithm, the environment and the options of a run, and sweeps over options.

A configuration is a TOML file. Its keys are `algorithm`, `env` and the names of options, as in `train`. Text values are
written as on the command line. Code is named as "module:name". The table `sweep` contains a list of values for each
swept option. The `run.json` of a run that `train` or the command line has started is a configuration, too.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytorchrl.agent.algorithms import Algorithm
from pytorchrl.agent.algorithms.registry import registered, registration_of
from pytorchrl.agent.declarations import as_member
from pytorchrl.agent.names import suggestion
from pytorchrl.agent.option_values.descriptions import FLOAT, by_name, code_in, from_json, mapping, to_json
from pytorchrl.agent.option_values.text import form_of, parse, takes_code, to_python, to_text
from pytorchrl.agent.schedules import Schedule
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.files.atomic import is_deep, parse_json, put_in_place, read_text
from pytorchrl.files.run_directory import check_description
from pytorchrl.support.code import Code, Trust, as_code, is_reference
from pytorchrl.training.composition import OptionSpec, known_names, option_specs
from pytorchrl.training.recipes import problem_of_id

SWEEP = "sweep"
"""Name of the table of swept options."""
MOST_RUNS = 1_000
"""Largest number of runs of a sweep, unless the caller raises it."""
_LARGEST_BYTES = 1_000_000
_LONGEST_NUMBER, _MOST_BITS = 1_000, 64
_FEWER_BITS = f"a whole number may have at most {_MOST_BITS} bits"
_OF_RUN = ("log_dir", "overwrite", "resume")
"""Options that belong to one run, so they are neither saved in a configuration nor read from a `run.json`."""


class ConfigFile:
    """The contents of a configuration file.

    Args:
        path: A TOML file, or the `run.json` of a run.
        trust: The modules that `train` may import to find the code that the file names. Reading imports nothing.

    Attributes:
        path: Path of the file, for messages.
        algorithm: Name of the algorithm, or "module:Class"; None if the file has none.
        env: Id of the environment, or the code that makes one; None if the file has none.

    Raises:
        ConfigError: The file cannot be read, or is not a configuration, or its environment is code of a module that
            must not be imported.
    """

    def __init__(self, path: str | os.PathLike[str], trust: Trust = Trust.INSTALLED) -> None:
        self.path, self._trust = os.fspath(path), trust
        text = _text_of(Path(path))
        self._lines = [] if self.path.endswith(".json") else text.split("\n")
        entries = _entries_of_run(self.path, text) if self.path.endswith(".json") else _parsed(self.path, text)
        self.algorithm, env = self._take_text(entries, "algorithm"), self._take_text(entries, "env")
        if env is not None and (problem := problem_of_id(env, trust)):
            raise ConfigError(f"{self.where('env')}: {problem}")
        self.env = Code(env, {}, trust) if is_reference(env) and env is not None else env
        sweep = entries.pop(SWEEP, {})
        if not isinstance(sweep, dict):
            raise ConfigError(f"{self.where(SWEEP)}: sweep must be a table of lists, got {sweep!r}")
        self._sweep: dict[str, object] = sweep
        self._entries = entries

    @property
    def is_sweep(self) -> bool:
        """Whether the file contains swept options."""
        return bool(self._sweep)

    def where(self, name: str, *, swept: bool = False) -> str:
        """Return the path of the file and, if the line is known, the number of the line that sets an option.

        If `swept` is true, this is the line in the table `sweep`.
        """
        key = re.compile(rf"""\s*(?P<quote>["']?){re.escape(name)}(?P=quote)\s*=|\s*\[\s*{re.escape(name)}\s*\]""")
        in_sweep = False
        for number, line in enumerate(self._lines, start=1):
            in_sweep = in_sweep or re.match(rf"\s*\[\s*{SWEEP}\s*\]", line) is not None
            if key.match(line) and (in_sweep == swept or name == SWEEP):
                return f"{self.path}, line {number}"
        return self.path

    def own_algorithm(self, trust: Trust) -> type[Algorithm] | None:
        """Return the class of the algorithm that the file names; None if the file names none.

        Raises:
            ConfigError: There is no such algorithm, or `trust` does not allow to import it; the message names the line.
        """
        try:
            return None if self.algorithm is None else registration_of(self.algorithm, trust).algorithm
        except ConfigError as error:
            raise ConfigError(f"{self.where('algorithm')}: {error}") from error

    def options(self, algorithm: str | type[Algorithm] | None) -> dict[str, object]:
        """Return the options as arguments of `train`, without the swept options.

        Args:
            algorithm: The algorithm; None if its options are unknown, because it must not be imported. Options that
                belong to no other algorithm are then returned as they stand in the file.

        Raises:
            ConfigError: An option is unknown, or a value has the wrong type. The message names the line of each error.
        """
        self._refuse_unknown(algorithm)
        return self._values(self._entries, specs_of(algorithm))

    def runs(self, algorithm: str | type[Algorithm] | None, most: int = MOST_RUNS) -> list[dict[str, object]]:
        """Return the swept options of each run, for all combinations of values; without a sweep, one empty mapping.

        Args:
            algorithm: The algorithm; see `options`.
            most: Largest number of runs.

        Raises:
            ConfigError: A swept option is unknown, is set outside the sweep too, or has no list of values; or there are
                more than `most` runs.
        """
        self._refuse_unknown(algorithm)
        problems = [
            f"{self.where(name, swept=True)}: {name} is set in [sweep] and outside it; remove one of the two"
            for name in self._sweep if name in self._entries]
        problems += [
            f"{self.where(name, swept=True)}: {name} in [sweep] must be a list of at least one value, got {value!r}"
            for name, value in self._sweep.items() if not isinstance(value, list) or not value]
        _refuse(problems)
        lists = {name: values for name, values in self._sweep.items() if isinstance(values, list)}
        if (count := math.prod(map(len, lists.values()))) > most:
            sizes = " x ".join(str(len(values)) for values in lists.values())
            raise ConfigError(f"{self.where(SWEEP)}: the sweep has {sizes} = {count:,} runs, but at most {most:,} are "
                              "made; shorten the lists, or raise max_runs (--max-runs)")
        specs = specs_of(algorithm)
        columns = [[self._values({name: value}, specs, swept=True) for value in values]
                   for name, values in lists.items()]
        return [dict(itertools.chain.from_iterable(choice.items() for choice in combination))
                for combination in itertools.product(*columns)]

    def located(self, error: ConfigError, names: Iterable[str]) -> ConfigError:
        """Return `error` with a longer message, which says where the file sets the options that the message mentions.

        Options that are not in `names` are ignored.
        """
        text = str(error)
        places = [f"{name}: {self.where(name)}" for name in names
                  if name in self._entries and re.search(rf"\b{re.escape(name)}\b", text)]
        return type(error)(f"{text} ({'; '.join(places)})") if places else error

    def _take_text(self, entries: dict[str, object], name: str) -> str | None:
        value = entries.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.where(name)}: {name} must be a string, got {value!r}")
        return value

    def _refuse_unknown(self, algorithm: str | type[Algorithm] | None) -> None:
        if algorithm is None:
            return
        known, specs = known_names(algorithm), option_specs(algorithm)
        found = [(name, False) for name in self._entries] + [(name, True) for name in self._sweep]
        _refuse(f"{self.where(name, swept=swept)}: there is no option {name!r}{suggestion(name, known)}"
                for name, swept in found if name not in specs)

    def _values(self, entries: Mapping[str, object], specs: Mapping[str, OptionSpec], *,
                swept: bool = False) -> dict[str, object]:
        found, problems = dict[str, object](), []
        for name, raw in entries.items():
            try:
                found[name] = _value(specs[name], raw, self._trust) if name in specs else raw
                if not _is_finite(found[name]):
                    raise ConfigError(f"must be finite, got {to_python(found[name])}")
            except ConfigError as error:  # noqa: PERF203 - all problems are reported at once
                problems.append(f"{self.where(name, swept=swept)}: {name}: {error}")
        _refuse(problems)
        return found


def specs_of(algorithm: str | type[Algorithm] | None) -> Mapping[str, OptionSpec]:
    """Return the options of `train` with an algorithm; None: the options of all algorithms of this package."""
    if algorithm is not None:
        return option_specs(algorithm)
    return {name: spec for other in registered() for name, spec in option_specs(other).items()}


def load_config(path: str | os.PathLike[str], *, trust: bool = False) -> dict[str, object]:
    """Return the contents of a configuration file as arguments of `train`: `train(**load_config("run.toml"))`.

    Nothing is imported. `train` imports the code that the file names.

    Args:
        path: A TOML file, or the `run.json` of an earlier run.
        trust: Whether the file may name any code: functions, and modules that belong to no installed package, for
            example those in the working directory. An algorithm of your own is then imported at once. Set it only for
            files whose author you trust.

    Raises:
        ConfigError: The file cannot be read, is not a configuration, lacks the algorithm or the environment, contains
            a wrong option, describes several runs, or names code that needs `trust`. For several runs, call
            `load_sweep`.
    """
    runs = load_sweep(path, trust=trust)
    if len(runs) > 1:
        raise ConfigError(f"{os.fspath(path)} describes {len(runs)} runs; use load_sweep, which returns all of them")
    return runs[0]


def load_sweep(
    path: str | os.PathLike[str], *, trust: bool = False, max_runs: int = MOST_RUNS,
) -> list[dict[str, object]]:
    """Return the arguments of `train` for each run of a configuration file.

    Args:
        path: See `load_config`.
        trust: See `load_config`.
        max_runs: Largest number of runs; a file with more runs is refused.

    Raises:
        ConfigError: The file lacks the algorithm or the environment, or is not valid.
    """
    file = ConfigFile(path, Trust.ALL if trust else Trust.INSTALLED)
    missing = [name for name, value in (("algorithm", file.algorithm), ("env", file.env)) if value is None]
    if missing:
        raise ConfigError(f"{file.path} needs {' and '.join(missing)}, such as algorithm = \"ppo\" and "
                          "env = \"CartPole-v1\"")
    algorithm = file.own_algorithm(Trust.ALL if trust else Trust.READ)
    common = {"algorithm": file.algorithm, "env": file.env, **file.options(algorithm)}
    return [{**common, **own} for own in file.runs(algorithm, max_runs)]


def save_config(
    path: str | os.PathLike[str], algorithm: str, env: str | Code, options: Mapping[str, object],
) -> None:
    """Write arguments of `train` to a file for `load_config`; omit arguments that concern one run, such as `log_dir`.

    Args:
        path: The TOML file, which is overwritten.
        algorithm: Name of the algorithm.
        env: Id of the environment.
        options: Options of `train`. Code is written as "module:name".

    Raises:
        ConfigError: A value cannot be written as text, such as a function without a name, or None in a list; or the
            file cannot be written.
    """
    specs, lines = option_specs(algorithm), [f"algorithm = {_quoted(algorithm)}", f"env = {_quoted(str(env))}"]
    order = list(specs)
    group = None
    for name in sorted(options.keys() - set(_OF_RUN), key=order.index):
        if specs[name].group != group:
            group = specs[name].group
            lines += ["", f"# {group}"]
        lines.append(f"{name} = {_toml(name, as_member(specs[name].hint, options[name]))}")
    try:
        with put_in_place(Path(path)) as file:
            file.write("\n".join([*lines, ""]).encode("utf-8"))
    except (OSError, UnicodeEncodeError) as error:
        raise ConfigError(f"the configuration cannot be written to {os.fspath(path)!r}: {error}") from error


def _text_of(path: Path) -> str:
    try:
        return read_text(path, _LARGEST_BYTES).removeprefix("\N{BYTE ORDER MARK}")  # some editors of Windows write it
    except UnicodeDecodeError as error:
        raise ConfigError(f"{os.fspath(path)!r} is not a text file in UTF-8: {error}; save it with the encoding "
                          "UTF-8") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration {os.fspath(path)!r} cannot be read: {error}") from error


def _parsed(path: str, text: str) -> dict[str, object]:
    try:
        tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError as error:
        raise ConfigError("TOML files need Python 3.11 or newer, or the package tomli; use the run.json of a run "
                          "instead") from error
    try:
        found: dict[str, object] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error or 'it is nested too deeply'}") from error
    except ValueError as error:  # Python refuses to convert a whole number of thousands of digits
        long = re.search(rf"[0-9_]{{{_LONGEST_NUMBER},}}", text)
        line = f", line {text.count(chr(10), 0, long.start()) + 1}" if long else ""
        raise ConfigError(f"{path}{line}: a number has too many digits; {_FEWER_BITS}") from error
    if is_deep(found):
        raise ConfigError(f"{path} is not a TOML file of this library: it is nested too deeply")
    return found


def _entries_of_run(path: str, text: str) -> dict[str, object]:
    """Return the entries of a `run.json`: its algorithm, environment, options and seed."""
    try:
        run = mapping(parse_json(text, path))
        check_description(run)
        recipe, seed = mapping(run["recipe"]), run["seed"]
        given = dict(mapping(recipe.get("options", {})))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not the run.json of a run: {error}") from error
    if not recipe:
        raise ConfigError(f"the run of {path} does not contain arguments of `train`, because it was composed in "
                          "Python, or its environment was given as an object; name the environment 'module:name'")
    given = {name: by_name(value) for name, value in given.items()}
    if code := [name for name, value in given.items() if code_in(value)]:
        raise ConfigError(f"the run of {path} was given code without a name, or inside other values, which a "
                          f"configuration cannot contain: {', '.join(code)}")
    options = {name: value for name, value in given.items() if name not in _OF_RUN}
    return {**options, "seed": seed, "algorithm": recipe.get("algorithm"), "env": recipe.get("env")}


def _value(spec: OptionSpec, raw: object, trust: Trust) -> object:
    """Convert a value of the file to the type of the option; its range is checked later.

    Raises:
        ConfigError: The value has another type, or is a number that no option accepts.
    """
    if raw is None or isinstance(raw, bool):
        return raw
    if isinstance(raw, int) and raw.bit_length() > _MOST_BITS:
        raise ConfigError(f"{_FEWER_BITS}, got one of {raw.bit_length():,} bits")
    if takes_code(spec.hint) and (code := _code(spec, raw, trust)) is not None:
        return code
    if isinstance(raw, (int, float, str)):
        return parse(raw if isinstance(raw, str) else repr(raw), spec.hint)
    if isinstance(raw, list):
        # A list of pairs is kept as a list, because it contains the points of a schedule; other lists become tuples.
        pairs = [tuple(item) for item in raw if isinstance(item, list)]
        return pairs if pairs and len(pairs) == len(raw) else tuple(raw)
    if isinstance(raw, dict):
        try:
            return from_json(raw)
        except (CheckpointError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"no value can be built from {raw!r:.100}: {error}") from error
    raise ConfigError(f"expected a string, a number, a list or a table, got {raw!r}")


def _is_finite(value: object) -> bool:
    """Return whether a value is not NaN or infinity, and contains none; entries of mappings may be infinite."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _code(spec: OptionSpec, raw: object, trust: Trust) -> Code | tuple[Code, ...] | None:
    """Return the code that a value of the file names; None if the value is no name, although the option takes code.

    Raises:
        ConfigError: The option is a list of code, and the value is not.
    """
    is_list = form_of(spec.hint).endswith(",...")
    items = [as_code(item, trust) for item in (raw if isinstance(raw, list) else [raw])]
    named = tuple(item for item in items if isinstance(item, Code))
    if is_list and len(named) < len(items):
        raise ConfigError(f"expected {form_of(spec.hint)}, such as [\"my_project:name\"], got {raw!r:.100}")
    return named if is_list else named[0] if named and not isinstance(raw, list) else None


def _toml(name: str, value: object) -> str:
    """Return the value of an option as TOML: None and schedules as text of the command line, other values as in JSON.

    Raises:
        ConfigError: The value is code, or contains None, which is refused because "none" is a usual text there.
    """
    described = to_text(value) if value is None else by_name(to_json(value, keep_tuples=False))
    if code_in(described):
        raise ConfigError(f"{name}={to_python(value)} is code, so it cannot be written to a file")
    return _written(name, to_text(value) if isinstance(value, Schedule) else described)


def _written(name: str, described: object) -> str:
    if described is None:
        raise ConfigError(f"{name} contains None, which TOML cannot express in a list or table")
    if isinstance(described, list):
        return f"[{', '.join(_written(name, item) for item in described)}]"
    if isinstance(described, dict) and FLOAT not in described:
        return f"{{{', '.join(f'{_quoted(key)} = {_written(name, item)}' for key, item in described.items())}}}"
    return str(described[FLOAT]) if isinstance(described, dict) else _quoted(described)


def _quoted(value: object) -> str:
    """Return a text, number or boolean as TOML, which differs from JSON in two escapes: surrogate pairs and DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _refuse(problems: Iterable[str]) -> None:
    if problems := list(problems):
        raise ConfigError("; ".join(problems))
