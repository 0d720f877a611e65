"""Make, number and lock the directory of a run.

run.json         settings, seed and versions, written once when training starts
metrics.jsonl    one JSON object per line, the learning curve
result.json      the summary, written when the run ends
monitor_*.csv    finished training episodes, one file per collection worker (only from `train` and `pytorchrl train`)
model.pt         the agent
checkpoints/     files from which a run is resumed

All of these files have the same mode (0666 minus the umask). If several users share a directory, they can therefore
read either all of its files or none.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path

from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import check_format, open_no_follow
from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

RUN_FILE, METRICS_FILE, RESULT_FILE, MODEL_NAME = "run.json", "metrics.jsonl", "result.json", "model"
CHECKPOINTS = "checkpoints"
LEGS = "legs"
"""Entry of `run.json`: the parts of a run that was resumed, each with the updates before it and its target steps."""
RUN_FORMAT = 1
"""Number of the format of `run.json`."""

# Pattern of the names of temporary files: the name of the final file, and the id of the writing process.
_TEMPORARY = re.compile(r"\.(run\.json|result\.json|probe|[^.]+\.pt)\.(\d+)")


def prepare_log_dir(
    log_dir: str | os.PathLike[str], *, run_name: str | None = None, overwrite: bool = False, resume: bool = False,
) -> Path:
    """Make the directory of one run and check that files can be written there.

    A `log_dir` that ends in a slash, such as `runs/`, is a directory of runs: the run gets a new directory in it,
    named `<run_name>-N` with the next number N. Several processes may call this function at the same time.

    Any other `log_dir` that contains an earlier run is refused by default. With `overwrite`, the earlier run is renamed
    (`runs/a` to `runs/a.1`). With `resume`, the earlier run is kept if it has a checkpoint, and otherwise renamed. A
    directory that contains the files of a run is never a directory of runs, even if `log_dir` ends in a slash. Nothing
    is ever removed, except temporary files.

    Args:
        log_dir: The directory of the run, or a directory of runs.
        run_name: Name of a new run, without `-N`; None: "run". Characters except letters, digits and `._-` become `-`.
        overwrite: Whether to rename an earlier run.
        resume: Whether an earlier run is to be continued.

    Returns:
        The directory of the run.

    Raises:
        ConfigError: `log_dir` is a file, cannot be written, or contains a run already; or `overwrite` or `resume` is
            given for a directory of runs.
    """
    path = Path(log_dir).expanduser()
    try:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"log_dir must be a directory, got the file {str(path)!r}")
        if is_directory_of_runs(log_dir):
            if overwrite or resume:
                raise ConfigError(_needs_one_run(path, "overwrite" if overwrite else "resume"))
            path = _make_numbered(path, run_name or "run")
        elif (path / RUN_FILE).exists():
            _handle_existing_run(path, overwrite=overwrite, resume=resume)
        path.mkdir(parents=True, exist_ok=True)
        for file in (path / METRICS_FILE, *path.glob("monitor_*.csv")):
            if file.is_symlink():
                raise ConfigError(f"{str(file)!r} is a link, and records would be appended to the file to which it "
                                  "leads; remove the link, or choose another log_dir")
        probe = path / f".probe.{os.getpid()}"
        with open(probe, "x", opener=open_no_follow):
            pass
        probe.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"log_dir {str(path)!r} cannot be written: {error}") from error
    return path


def check_description(run: Mapping[str, object]) -> None:
    """Raise `ValueError` unless the contents of a `run.json` describe a run in a format that this version reads."""
    if "recipe" not in run:
        raise ValueError("it does not describe a run: its entry 'recipe' is missing")
    check_format(run, RUN_FORMAT)


def is_directory_of_runs(log_dir: str | os.PathLike[str]) -> bool:
    """Return whether `log_dir` is a directory of runs: its name ends in a slash, and it contains no run itself."""
    return os.fspath(log_dir).endswith(os.sep) and not (Path(log_dir).expanduser() / RUN_FILE).exists()


def no_run(path: Path, missing: str) -> str:
    """Return the error message for a `path` that is not the directory of a run, because it lacks the file `missing`.

    If `path` is a directory of runs, the message names the newest run.
    """
    newest = _newest_run(path)
    if path.is_file():
        run = next((parent for parent in list(path.parents)[:2] if (parent / RUN_FILE).exists()), path.parent)
        return f"{str(path)!r} is a file; name the directory of the run, {str(run)!r}"
    if newest is None:
        return f"{str(path)!r} contains no run: {missing} is missing"
    return f"{str(path)!r} is a directory of runs; name one of them, for example the newest, {str(newest)!r}"


def _newest_run(runs: Path) -> Path | None:
    found = sorted(runs.glob(f"*/{RUN_FILE}"), key=lambda file: file.stat().st_mtime)
    return found[-1].parent if found else None


def _needs_one_run(runs: Path, option: str) -> str:
    """Return the error message: `option` needs the directory of one run, but `runs` is a directory of runs."""
    newest = _newest_run(runs)
    name = f", for example the newest, {str(newest)!r}" if newest else f", for example {str(runs / 'a')!r}"
    return (f"{option}=True needs the directory of one run, but log_dir {str(runs) + os.sep!r} is a directory of runs; "
            f"name the run{name}")


def _make_numbered(runs: Path, name: str) -> Path:
    """Make a directory with a new number, `<name>-1`, `<name>-2`, ...; no two processes get the same directory."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip(".-") or "run"
    runs.mkdir(parents=True, exist_ok=True)
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    numbers = [int(found[1]) for path in runs.iterdir() if (found := pattern.fullmatch(path.name))]
    for number in itertools.count(max(numbers, default=0) + 1):
        with contextlib.suppress(FileExistsError):
            path = runs / f"{name}-{number}"
            path.mkdir()
            return path
    raise AssertionError("there is always a greater number")


def _handle_existing_run(path: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse, rename or keep the run in `path`; see `prepare_log_dir`."""
    if not overwrite and not resume:
        raise ConfigError(
            f"log_dir {str(path)!r} already contains a run; choose another directory; pass a directory of runs that "
            f"ends in a slash, such as {_runs_beside(path)!r}, in which each run gets its own directory; or pass "
            "overwrite=True (--overwrite), which renames the old run, or resume=True (--resume), which continues it "
            "from its newest checkpoint")
    if overwrite or not any((path / CHECKPOINTS).glob("step-*.pt")):
        Lock(path).close()
        path = path.resolve()
        name = _free_name(path)
        path.rename(name)
        if resume:
            logger.warning("the run in %s had no checkpoint; it was renamed to %s, and a new run starts", path, name)


def _runs_beside(path: Path) -> str:
    """Suggest a directory of runs: the parent of `path` if it is named `runs`, otherwise `runs` next to `path`."""
    return str(path.parent if path.parent.name == "runs" else path.parent / "runs") + os.sep


def _free_name(path: Path) -> Path:
    """Return the first of `<path>.1`, `<path>.2`, ... that does not exist."""
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _is_alive(process_id: int) -> bool:
    """Return whether a process of this machine has this id; a process of another user counts as alive."""
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


class Lock:
    """Lock on the directory of a run. No other run can use the directory until `close()` or the end of the process.

    Temporary files of earlier runs that were killed while writing a file are removed.

    Raises:
        ConfigError: Another process holds the lock.
    """

    def __init__(self, log_dir: Path) -> None:
        self._descriptor: int | None = os.open(log_dir, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise ConfigError(f"log_dir {str(log_dir)!r} is in use by another run; wait until that run ends, or choose "
                              "another directory") from None
        for path in log_dir.iterdir():
            found = _TEMPORARY.fullmatch(path.name)
            if found and not _is_alive(int(found[2])):
                with contextlib.suppress(OSError):  # for example, a directory has such a name
                    path.unlink()

    def close(self) -> None:
        """Release the lock; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
