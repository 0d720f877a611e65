"""Write the records of a run as JSON lines and for TensorBoard, and show the progress line."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from pytorchrl.agent.data import Episode
from pytorchrl.files.atomic import put_in_place, with_checksum
from pytorchrl.files.lines import AppendedFile
from pytorchrl.files.run_directory import METRICS_FILE, RUN_FORMAT
from pytorchrl.monitor.findings import RunFinding
from pytorchrl.support.cores import usable_cores
from pytorchrl.support.display import escape, in_notebook
from pytorchrl.support.terminal import get_logger, printable, red
from pytorchrl.support.untyped import Json, MetricsDict, StateDict, Untyped

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

logger = get_logger(__name__)

Status = MetricsDict
"""The figures of the progress line; see `Measurements.status`."""

# Texts from environments and exceptions are untrusted. They are truncated here, and JSON escapes control characters.
_MAX_TEXT = 1000
_MAX_KEYS = 10_000
# `RateWindow` stores the last five intervals between arrivals. Its window spans at least three times the longest one.
_INTERVALS, _INTERVALS_PER_WINDOW = 5, 3
# The smallest share of dropped env steps in the progress line.
_SHOWN_SHARE = 0.01
# A repository on a slow disk must not delay a run for longer.
_GIT_TIMEOUT_S = 2.0
_PROGRAM = "pytorchrl"
# The smallest width of a terminal, in columns, in which there is room for a bar beside the figures.
_LEAST_FOR_BAR = 100


def plain(value: object) -> Json:
    """Convert `value` to JSON's types. Non-finite numbers become None, and objects of unknown types become text."""
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key)[:_MAX_TEXT]: plain(value[key]) for key in list(value)[:_MAX_KEYS]}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "size", 1) in (1, ()):  # a numpy scalar
        return plain(value.item())
    return str(value)[:_MAX_TEXT]


def to_json(value: object, *, indent: int | None = None) -> str:
    """Return strict JSON in ASCII, on one line unless `indent` is given; control characters in texts are escaped."""
    # DEL is the only control character that JSON does not escape.
    return json.dumps(plain(value), allow_nan=False, indent=indent).replace("\x7f", "\\u007f")


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write an object with its checksum atomically: a reader sees either the old file or the complete new file."""
    with put_in_place(path) as file:
        file.write((to_json(with_checksum(plain(value)), indent=2) + "\n").encode("ascii"))


def description(
    recipe: Mapping[str, object], target_steps: int, seed: int, settings: Mapping[str, object],
) -> dict[str, object]:
    """Return the contents of `run.json` for a run that starts now; `settings` describes scheme, agent and learner."""
    return {"format": RUN_FORMAT, "recipe": recipe, "target_steps": target_steps, "seed": seed, **settings,
            "versions": versions(), "origin": origin(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def versions() -> dict[str, str]:
    """Return the versions of Python, of the platform and of the main packages, without importing these packages."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("pytorchrl", "torch", "numpy", "gymnasium", "ray", "ale-py", "mujoco", "pettingzoo"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # noqa: PERF203 - there are only eight names
            continue
    return found


def origin() -> dict[str, object]:
    """Return the entry `origin` of `run.json`: command, commit and machine; "" if the commit is unknown."""
    return {"command": _command(), "commit": commit(Path.cwd()), "machine": _machine()}


def _command() -> str:
    if in_notebook():
        return "a notebook"
    program, *arguments = sys.argv or [""]
    is_own = Path(program).name in (_PROGRAM, "__main__.py")
    return shlex.join([_PROGRAM] if is_own else ["python", *filter(None, [program])]) + "".join(
        f" {shlex.quote(argument)}" for argument in arguments)


def commit(folder: Path) -> str:
    """Return the commit of the git repository that contains a directory.

    The text ends in "-dirty" if files have changed since this commit. It is empty if there is no repository, no
    commit, or no git, or if git takes longer than two seconds.
    """
    # Git can run a program that a setting of the repository names, unless this setting is switched off.
    command = ["git", "-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def _machine() -> dict[str, object]:
    """Return the machine's name, the number of cores that this process may use, and the names of its GPUs."""
    torch = sys.modules.get("torch")
    # A process that has not used CUDA must not start it here, because child processes could then not use it.
    used = torch is not None and torch.cuda.is_initialized()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if torch and used else []
    return {"name": platform.node(), "cores": usable_cores(), "gpus": list(gpus)}


class Recorder:
    """Writer of a run's records into its directory: JSON lines, and TensorBoard files if TensorBoard is installed.

    Args:
        log_dir: The directory.
        tensorboard: Whether to write TensorBoard files.
        after: Env steps at the checkpoint from which the run is resumed; None: the run is new.
        resumed: The `state` of the records at this checkpoint; records that were written later are removed. None: the
            run is new.
    """

    def __init__(
        self, log_dir: Path, *, tensorboard: bool, after: int | None = None,
        resumed: Mapping[str, object] | None = None,
    ) -> None:
        self._file = AppendedFile(log_dir / METRICS_FILE, resumed)
        self._tensorboard = _tensorboard_writer(log_dir, None if after is None else after + 1) if tensorboard else None

    @property
    def state(self) -> dict[str, object]:
        """The state of the records, to be passed as `resumed` when the run is resumed."""
        return self._file.state

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record; numbers that are not finite become null. A full disk does not end the run."""
        self._file.append(to_json(record))
        try:
            if self._tensorboard is not None:
                for name, value in _flat(record):
                    self._tensorboard.add_scalar(name, value, record["env_steps"])
        except OSError as error:
            logger.warning("TensorBoard files are no longer written: %s", error)
            self._tensorboard = None

    def close(self) -> None:
        """Close the files; idempotent."""
        self._file.close()
        tensorboard, self._tensorboard = self._tensorboard, None
        try:
            if tensorboard is not None:
                tensorboard.close()
        except OSError as error:
            logger.warning("TensorBoard files may be incomplete: %s", error)


def _tensorboard_writer(log_dir: Path, purge_step: int | None) -> Untyped:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # the extra `tensorboard` is not installed
        return None
    return SummaryWriter(str(log_dir), purge_step=purge_step)


def _flat(record: Mapping[str, object], prefix: str = "") -> list[tuple[str, float]]:
    numbers: list[tuple[str, float]] = []
    for key, value in record.items():
        if isinstance(value, Mapping):
            numbers += _flat(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            numbers.append((f"{prefix}{key}", value))
    return numbers


class RateWindow:
    """Steps per second over the last `seconds` seconds, or over the whole run if the run is shorter.

    If rollouts arrive rarely, the window is longer than `seconds`, so that it contains arrivals and the rate is not 0:
    the window spans at least three times the longest of the last five intervals between arrivals of rollouts. If a run
    stalls, the rate becomes 0 after one window.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._points: deque[tuple[float, int]] = deque()
        self._last_arrival = 0.0
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)

    def add(self, now: float, steps: int) -> None:
        """Record the total number of steps at the time `now` in seconds; neither number may decrease."""
        has_arrived = bool(self._points) and steps > self._points[-1][1]
        self._points.append((now, steps))
        if self._intervals:  # without intervals between arrivals, the window is the whole run
            start = now - max(self._seconds, _INTERVALS_PER_WINDOW * max(self._intervals))
            while len(self._points) > 2 and self._points[1][0] <= start:
                self._points.popleft()
        if has_arrived:
            self._intervals.append(now - self._last_arrival)
        if has_arrived or len(self._points) == 1:
            self._last_arrival = now

    @property
    def rate(self) -> float:
        """The steps per second within the window; 0 before the second call of `add`."""
        if len(self._points) < 2:
            return 0.0
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start else 0.0


class EpisodeWindow:
    """The last `size` training episodes and, with several policies, the last `size` episodes of each policy."""

    def __init__(self, size: int = 100) -> None:
        self._size = size
        self._returns: deque[float] = deque(maxlen=size)
        self._lengths: deque[float] = deque(maxlen=size)
        self._policy_returns: dict[str, deque[float]] = {}
        self._range: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self._returns)

    def extend(self, episodes: Iterable[Episode]) -> None:
        """Add episodes in the order in which they ended."""
        for episode in episodes:
            self._returns.append(episode.env_return)
            self._range = _widened(self._range, episode.env_return)
            self._lengths.append(episode.length)
            for policy, value in (episode.policy_returns or {}).items():
                self._of(policy).append(value)

    def _of(self, policy: str) -> deque[float]:
        return self._policy_returns.setdefault(policy, deque(maxlen=self._size))

    @property
    def return_mean(self) -> float | None:
        """The mean raw return; None before the first episode has ended."""
        return statistics.fmean(self._returns) if self._returns else None

    @property
    def return_range(self) -> dict[str, float] | None:
        """The smallest and the largest raw return of all episodes, not only of the last ones; None before the first."""
        return None if self._range is None else dict(zip(("min", "max"), self._range, strict=True))

    @property
    def length_mean(self) -> float | None:
        """The mean number of env steps of the episodes in the window; None before the first episode has ended."""
        return statistics.fmean(self._lengths) if self._lengths else None

    @property
    def policy_return_means(self) -> dict[str, float]:
        """The mean raw return of each policy over its last `size` episodes; empty if there is only one policy."""
        return {policy: statistics.fmean(returns) for policy, returns in self._policy_returns.items()}

    def state(self) -> StateDict:
        """Return plain values from which `restore` can continue."""
        return {"returns": list(self._returns), "lengths": list(self._lengths), "range": self._range,
                "policy_returns": {policy: list(returns) for policy, returns in self._policy_returns.items()}}

    def restore(self, state: StateDict) -> None:
        """Continue from the `state()` of another window."""
        self._returns.extend(state["returns"])
        self._lengths.extend(state["lengths"])
        self._range = state["range"] and tuple(state["range"])
        for policy, returns in state["policy_returns"].items():
            self._of(policy).extend(returns)


def _widened(found: tuple[float, float] | None, value: float) -> tuple[float, float]:
    """Return the smallest and the largest of the numbers in `found` and `value`."""
    return (value, value) if found is None else (min(found[0], value), max(found[1], value))


class Means:
    """Means of named numbers since the last `take()`; a number that is not finite makes its mean NaN or infinite."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._taken: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        """Add one number for each name in `values`; the names may differ between calls."""
        sums, counts = self._sums, self._counts
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value
            counts[name] = counts.get(name, 0) + 1

    def peek(self) -> dict[str, float]:
        """Return the means since the last `take`; if no number was added, the latest nonempty result of `take`."""
        return self._means() or dict(self._taken)

    def take(self) -> dict[str, float]:
        """Return the means of the numbers since the last `take`, and reset them; empty if no number was added."""
        means = self._means()
        self._taken = means or self._taken
        self._sums.clear()
        self._counts.clear()
        return means

    def state(self) -> dict[str, dict[str, float]]:
        """Return plain values from which `restore` continues."""
        return {"sums": dict(self._sums), "counts": dict(self._counts), "taken": dict(self._taken)}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue from the `state` of another `Means` object."""
        self._sums, self._taken = dict(state["sums"]), dict(state["taken"])
        self._counts = {name: int(count) for name, count in state["counts"].items()}

    def _means(self) -> dict[str, float]:
        return {name: total / self._counts[name] for name, total in self._sums.items()}


def next_multiple(every: int | None, env_steps: int) -> float:
    """Return the first multiple of `every` above `env_steps`; infinity if `every` is None."""
    return float("inf") if every is None else float((env_steps // every + 1) * every)


def progress_text(status: Status) -> str:
    """Return a line of figures: steps, rate, return, time left, and the lag, drops, lost workers and restarts if any.

    A narrow terminal cuts the line off, so the figures that every run has come first. Steps beyond the target, which
    the last rollouts may add, are not shown.
    """
    target, rate = status["target_steps"], status["env_steps_per_s"]
    steps, returns = min(status["env_steps"], target), status["return_mean"]
    left = _clock((target - steps) / rate) if rate else "--:--"
    workers, missing = status["workers"], status["workers_missing"]
    parts = [
        f"{steps:>{len(f'{target:,}')},}/{target:,} steps", f"{steps / max(1, target):4.0%}", f"{rate:,.0f} steps/s",
        f"return {'-' if returns is None else f'{returns:.1f}'}" + by_policy(status.get("policy_returns")),
    ]
    if status.get("eval_return") is not None:
        parts.append(f"eval {status['eval_return']:.1f}")
    parts.append(f"left {left}")
    if status.get("batch_lag") is not None:
        parts.append(f"lag {status['batch_lag']:.1f} batches")
    elif status["lag"]:
        parts.append(f"lag {status['lag']:.1f} updates")
    if (dropped := status.get("dropped_share", 0.0)) >= _SHOWN_SHARE:
        parts.append(f"dropped {dropped:.0%}")
    if missing:
        parts.append(f"workers {workers - missing}/{workers}")
    if restarted := status.get("envs_restarted"):
        parts.append(f"envs restarted {restarted}")
    return printable("  ".join(parts))


def by_policy(returns: Mapping[str, float] | None) -> str:
    """Return a text that lists the mean return of each policy in brackets; "" for a single policy."""
    return f" ({', '.join(f'{policy} {mean:.1f}' for policy, mean in returns.items())})" if returns else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """The progress line on stderr.

    In a terminal, the line is redrawn in place, by rich if that is installed. Elsewhere, new lines are printed. In a
    notebook, `NotebookProgress` takes its place.

    If something goes wrong, the line begins with a word in red, a sentence is printed above it once, and all sentences
    are printed again at the end; see `monitor.findings`.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream: IO[str] | None = stream or sys.stderr
        self._live: _RichLine | None = None
        self._width = 0
        self._shown: tuple[object, ...] = ()  # the figures of the last line, outside a terminal
        self._findings: Sequence[RunFinding] = ()
        self._told: set[str] = set()  # the words of findings whose sentences were printed
        # Outside a terminal, lines are not overwritten, so the pauses between lines grow from one to sixty seconds.
        self._pause_s, self._next_line = 1.0, 0.0
        try:
            self._terminal = self._stream is not None and self._stream.isatty()
        except ValueError:  # the stream is closed
            self._terminal, self._stream = False, None
        if self._terminal:
            self._live = _rich_progress(self._stream)

    def announce(self, text: str, *, keep: bool = False) -> None:
        """Show a line of text before training. In a terminal, the next line replaces it unless `keep` is true."""
        if self._stream is None:
            return
        first, *others = self._lines_of(text) if keep else [printable(text)]
        try:
            if self._terminal:
                self._stream.write("\r" + "\n".join([first.ljust(self._width), *others]) + "\n" * keep)
                self._width = 0 if keep else len(first)
            else:
                self._stream.write(first + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None

    def show(self, status: Status, *, last: bool = False) -> None:
        """Show the progress of the run. A closed or broken stream ends the display, not the run."""
        if self._stream is None:
            return
        self._findings = status.get("findings", ())
        try:
            if not last:
                self._tell_new()
            if self._live is not None:
                if self._width:  # the line contains text that `announce` wrote
                    self._stream.write("\r" + " " * self._width + "\r")
                    self._width = 0
                self._live.update(status)
            elif self._terminal:
                line, words = progress_text(status), words_of(self._findings)
                self._stream.write("\r" + red(words) + line.ljust(self._width - len(words)))
                self._width = len(words) + len(line)
                self._stream.flush()
            else:
                now, figures = time.monotonic(), (status["env_steps"], status["return_mean"], status.get("eval_return"))
                if figures != self._shown if last else now >= self._next_line:
                    self._next_line, self._shown = now + self._pause_s, figures
                    self._pause_s = min(60.0, 1.5 * self._pause_s)
                    self._stream.write(words_of(self._findings) + progress_text(status) + "\n")
                    self._stream.flush()
        except (OSError, ValueError):
            self._stream = None

    def _lines_of(self, text: str) -> list[str]:
        """Return text in lines that a terminal need not break within words; elsewhere, return a single line."""
        columns = shutil.get_terminal_size().columns
        lines = textwrap.wrap(printable(text), columns, break_long_words=False, break_on_hyphens=False)
        return lines if lines and self._terminal else [printable(text)]

    def _tell_new(self) -> None:
        """Print the sentence of each finding that is new, above the line."""
        for finding in self._findings:
            if finding.word not in self._told:
                self._told.add(finding.word)
                if self._live is not None:
                    self._live.tell("\n".join(self._lines_of(finding.sentence)))
                else:
                    self.announce(finding.sentence, keep=True)

    def close(self) -> None:
        """End the progress line, and print the sentence of each finding; idempotent."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        try:
            if self._live is not None:
                self._live.close()
            if self._terminal and self._width:
                stream.write("\n")
            for finding in self._findings:
                sentence = "\n".join(self._lines_of(finding.sentence))
                stream.write((red(sentence) if self._terminal else sentence) + "\n")
            stream.flush()
        except (OSError, ValueError):
            logger.debug("the progress line could not be ended")


class _Handle(Protocol):
    """An output of a notebook's cell, as IPython returns it."""

    def update(self, shown: object) -> None:
        """Replace the output."""


class NotebookProgress(Progress):
    """The progress of a run as a bar in the output of a notebook's cell, which is updated in place.

    Notebooks show stderr as red text, so nothing is written there. A notebook that cannot show HTML shows the line.
    Below it stands a sentence for each thing that goes wrong at present; see `monitor.findings`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[str] = []
        self._line = ""
        self._share: float | None = None  # of the env steps; None before training
        self._display: Callable[..., _Handle] | None = sys.modules["IPython"].display.display
        self._handle: _Handle | None = None

    def __repr__(self) -> str:
        return "\n".join([*self._kept, self._line, *self._sentences()])

    def _repr_html_(self) -> str:
        kept = "".join(f"<div>{escape(line)}</div>" for line in self._kept)
        bar = (f'<progress value="{self._share:.4f}" max="1" style="width:12em;vertical-align:middle"></progress> '
               if self._share is not None else "")
        wrong = "".join(f'<div style="color:#d33">{escape(sentence)}</div>' for sentence in self._sentences())
        return (f'<div style="color:inherit;font-family:monospace;font-size:90%;white-space:pre-wrap">{kept}<div>'
                f"{bar}{escape(self._line)}</div>{wrong}</div>")

    def _sentences(self) -> list[str]:
        return [printable(finding.sentence) for finding in self._findings]

    def announce(self, text: str, *, keep: bool = False) -> None:
        """Show a line of text before training; the next line replaces it unless `keep` is true."""
        self._line = "" if keep else printable(text)
        self._kept += [printable(text)] if keep else []
        self._update()

    def show(self, status: Status, *, last: bool = False) -> None:
        """Show the progress of the run. A display that fails ends the display, not the run."""
        self._line, self._share = progress_text(status), min(1.0, status["env_steps"] / max(1, status["target_steps"]))
        self._findings = status.get("findings", ())
        self._update()

    def _update(self) -> None:
        if self._display is None:
            return
        try:
            if self._handle is None:
                self._handle = self._display(self, display_id=True)
            else:
                self._handle.update(self)
        except Exception as error:  # noqa: BLE001 - the libraries of a notebook have many kinds of errors
            self._display = None
            logger.debug("the progress bar could not be shown: %s", error)

    def close(self) -> None:
        """End the display; idempotent."""
        self._display = None


class _RichLine:
    """The progress line with a bar. Only `update` redraws the line, because rich's background thread is turned off."""

    def __init__(self, progress: RichProgress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def update(self, status: Status) -> None:
        if self._task is None:
            self._task = self._progress.add_task("", total=max(1, status["target_steps"]))
            self._progress.start()
        words = words_of(status.get("findings", ()))
        text = (f"[bold red]{words}[/]" if words else "") + progress_text(status).replace("[", "\\[")
        self._progress.update(
            self._task, completed=min(status["env_steps"], status["target_steps"]), description=text)
        self._progress.refresh()

    def tell(self, sentence: str) -> None:
        """Print a sentence in red above the line."""
        self._progress.console.print(sentence, style="red", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._task is not None:
            self._progress.stop()


def _rich_progress(stream: IO[str] | None) -> _RichLine | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Rich
    except ImportError:  # the extra `cli` is not installed
        return None
    console, text = Console(file=stream), TextColumn("{task.description}")
    columns = (BarColumn(bar_width=20), text) if console.width >= _LEAST_FOR_BAR else (text,)
    return _RichLine(Rich(*columns, console=console, auto_refresh=False))


def start_progress(title: str | None, log_dir: Path | None) -> Progress:
    """Return a new progress line, and show the lines before training: `title`, unless it is None, and the directory."""
    progress = NotebookProgress() if in_notebook() else Progress()
    if title is not None:
        progress.announce(title, keep=True)
    progress.announce("nothing is saved, because there is no log_dir" if log_dir is None else f"saved in {log_dir}",
                      keep=True)
    return progress


def words_of(findings: Sequence[RunFinding]) -> str:
    """Return the words of findings, with which the progress line begins; empty if there are none."""
    return ", ".join(finding.word for finding in findings) + ":  " * bool(findings)
