"""Find the code that a text names, as `module:name`; the one place that decides which modules may be imported by name.

A name that the user gives, as a flag or an argument, is imported. A name in a file is not the user's own word:

| reader | imports |
|---|---|
| everything that only reads: `load`, `load_config`, `enjoy`, `export`, `dataset`, `train --dry-run` | nothing |
| `train --config`, `profile --config` | modules of installed packages |
| each of them with `trust=True` or `--trust` | every module, also in the working directory |

Worker processes of environments import this module, so it must not import torch.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

from pytorchrl.errors import ConfigError, install_hint

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_OWN = __name__.partition(".")[0]
_ROOT = Path(__file__).resolve().parents[2]
_SITE = ("site-packages", "dist-packages")
CALL = "call"
"""Key of a table that names code with arguments: `{call = "module:name", size = 3}`."""
IF_TRUSTED = "if you trust the author of the file, pass trust=True (`--trust` on the command line)"
"""The end of each error message about a file that needs trust."""


class Trust(enum.IntEnum):
    """The modules that may be imported because a text names them."""

    READ = 0
    """None."""
    INSTALLED = 1
    """Modules of installed packages."""
    ALL = 2
    """Every module, also in the working directory."""


@dataclass(frozen=True)
class Code:
    """A class or function that a text names, before it is imported.

    Attributes:
        reference: The name, `module:name`.
        arguments: Keyword arguments.
        trust: The modules that `train` may import to find the code.
    """

    reference: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    trust: Trust = Trust.ALL

    def __str__(self) -> str:
        """Return the text that names the code on the command line."""
        return json.dumps({CALL: self.reference, **self.arguments}) if self.arguments else self.reference


def is_reference(text: object) -> bool:
    """Return whether a value is a text of the form `module:name`."""
    return isinstance(text, str) and _REFERENCE.fullmatch(text) is not None


def as_code(value: object, trust: Trust = Trust.ALL) -> object:
    """Return the `Code` that a text or a table names, with at most this `trust`; return any other value unchanged.

    Raises:
        ConfigError: The table names no code.
    """
    if isinstance(value, Code):
        return replace(value, trust=min(value.trust, trust))
    if is_reference(value):
        return Code(str(value), {}, trust)
    if isinstance(value, Mapping) and CALL in value:
        if not is_reference(value[CALL]):
            raise ConfigError(f'{CALL} must name code as "module:name", got {value[CALL]!r:.100}')
        return Code(value[CALL], {name: item for name, item in value.items() if name != CALL}, trust)
    return value


def may_import(module: str, trust: Trust) -> bool:
    """Return whether a module is imported already, or may be imported."""
    return module in sys.modules or trust is Trust.ALL or (trust is Trust.INSTALLED and is_installed(module))


def refusal(name: str) -> str:
    """Return the error message for code in a module that must not be imported: the reason, and what to do.

    Args:
        name: The code: `module:name`, an environment id `module:Id`, or the name of a module.
    """
    module = name.partition(":")[0]
    top = module.partition(".")[0]
    state, remedy = "", ""
    if not is_installed(module):
        is_here = any(os.path.lexists(place) for place in (top, f"{top}.py"))
        state = " and which " + ("lies in the working directory" if is_here else "belongs to no installed package")
        remedy = "" if is_here else ", or install its package"
    return (f"{name!r} is code in the module {module!r}, which this process has not imported{state}; import the module "
            f"in your program first{remedy}, or, {IF_TRUSTED}")


def find_code(reference: str, trust: Trust) -> object:
    """Return the class or function that a text names, and import its module if `trust` allows this.

    Raises:
        ConfigError: The module may not or cannot be imported, or has no such name.
    """
    module, _, qualname = reference.partition(":")
    if "<" in qualname:
        raise ConfigError(f"{reference} was defined inside a function, so it cannot be imported; define it at the top "
                          "of a module")
    if not may_import(module, trust):
        raise ConfigError(refusal(reference))
    found: object = import_module(module, reference)
    own = [name for name, value in vars(found).items()
           if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module]
    for name in qualname.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"module {module!r} has no class or function {qualname!r}; it defines: "
                              f"{', '.join(own) or 'none'}")
        found = getattr(found, name)
    return found


def import_module(module: str, name: str) -> ModuleType:
    """Import a module because a text names it; `name` is the text, for the error message.

    Raises:
        ConfigError: The module cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = missing_package(error)
        if missing == module.partition(".")[0]:
            advice = ("run from the folder that contains the module, or add that folder to PYTHONPATH, or install the "
                      "module's package")
        elif missing:
            advice = f"install the package that contains {missing}"
        else:
            advice = "correct this import, or install versions of its packages that fit each other"
        raise ConfigError(f"{name} cannot be imported ({error}); {advice}") from error
    except Exception as error:
        raise ConfigError(f"importing the module of {name!r} raised {type(error).__name__}: {error}") from error


def import_extra(package: str, extra: str, need: str) -> ModuleType:
    """Import a package of an extra; `need` is what needs it, for the error message.

    Raises:
        ConfigError: The package cannot be imported; the message contains the command that installs the extra.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{need} needs the extra `{extra}`: {install_hint(extra)} ({error})") from error


def missing_package(failure: ImportError) -> str | None:
    """Return the name of the absent package because of which an import failed.

    None if the import failed for another reason, such as versions of packages that do not fit each other.
    """
    name = failure.name if isinstance(failure, ModuleNotFoundError) else None
    return name if name and "." not in name else None


def is_installed(module: str) -> bool:
    """Return whether a module belongs to this package or to an installed one; nothing is imported.

    Modules of Python itself do not count: they are not made to be named in a file, and some open a browser.
    """
    top = module.partition(".")[0]
    if top == _OWN:
        return True
    with local_imports_off():
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError, AttributeError):
            return False
    if spec is None:
        return False
    places = [Path(place).resolve() for place in (*(spec.submodule_search_locations or ()), spec.origin)
              if place is not None]
    folders = _site_folders()
    return bool(places) and (top in _editable(tuple(folders)) or all(
        any(folder in place.parents for folder in folders) for place in places))


def _site_folders() -> list[Path]:
    return [Path(entry).resolve() for entry in sys.path if Path(entry).name in _SITE]


@functools.cache
def _editable(folders: tuple[Path, ...]) -> frozenset[str]:
    """Return the modules of packages that are installed from their source folders (editable installs)."""
    found: set[str] = set()
    for distribution in importlib.metadata.distributions(path=list(map(str, folders))):
        if '"editable": true' in (distribution.read_text("direct_url.json") or ""):
            found.update((distribution.read_text("top_level.txt") or "").split())
    return frozenset(found)


@contextlib.contextmanager
def local_imports_off() -> Iterator[None]:
    """Take the working directory off Python's path during the `with` block, except a folder with this package.

    Files of strangers often lie in the working directory, where a `jax.py` would be imported in place of a package.
    """
    kept, here = list(sys.path), Path.cwd()
    if here != _ROOT:
        sys.path[:] = [entry for entry in kept if entry and Path(entry).resolve() != here]
    try:
        yield
    finally:
        sys.path[:] = kept


def make_importable() -> None:
    """Add the working directory to Python's path, as `python -m` does, so that modules in it can be imported."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
