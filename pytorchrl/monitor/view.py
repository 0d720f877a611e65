"""The view of one run: a typed model that the terminal, the report and the board show."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytorchrl.files.reading import (
    Record,
    Records,
    check_run,
    count,
    item,
    mapping,
    number,
    problem_of_records,
    read_checked,
    rows,
    text,
)
from pytorchrl.files.run_directory import METRICS_FILE, RESULT_FILE, RUN_FILE
from pytorchrl.monitor import time_shares
from pytorchrl.monitor.findings import RunFinding, find

# Rates and time shares are averages over about this many seconds before the latest record.
_WINDOW_S = 10.0
# A wait is shown only if it takes at least this share of the waiting workers' time.
_MIN_WAIT_SHARE = 0.05
# A queue counts as full if its mean length is at least this share of its size. The share is below 1, because each
# measurement of the length follows the removal of a batch.
_FULL = 0.9
# A run is silent if the time since its last record exceeds both `_SILENT_S` seconds and `_SILENT_FACTOR` times the
# longest of its recent intervals between records.
_SILENT_FACTOR, _SILENT_S = 5.0, 30.0

# Records that are kept if only the latest are wanted, and if only the latest rates are: the state needs ten records.
_MOST_KEPT, _KEPT_FOR_RATES = 500, 10

_LEVELS = ("collection", "gradients", "update")
_WHO = {"collection": "collection workers", "gradients": "gradient workers", "update": "the update worker"}


@dataclass(frozen=True)
class Lag:
    """Mean, 90th percentile and maximum of policy lags or gradient lags, in updates."""

    mean: float
    p90: float
    max: float


@dataclass(frozen=True)
class WorkerView:
    """One worker of the worker tree.

    Attributes:
        name: Name of the worker, such as "GWorker 0/CWorker 3".
        is_collector: Whether the worker collects; otherwise, it computes gradients.
        total: Number of env steps or gradients of the worker that have reached the learner so far.
        rate: Env steps or gradients per second in about the last 10 seconds; None if the rate is not known yet.
        restarts: Number of times that the worker was lost and replaced.
        lag: Policy lag of the worker's rollouts since the start; None if the lag is not known.
    """

    name: str
    is_collector: bool
    total: int
    rate: float | None
    restarts: int
    lag: Lag | None


@dataclass(frozen=True)
class Wait:
    """A wait of the workers at one level of the worker tree.

    Attributes:
        who: The workers that wait, such as "gradient workers".
        whom: The workers, or the data, for which they wait.
        share: The share of the level's time that the wait takes, in [0, 1].
    """

    who: str
    whom: str
    share: float


@dataclass(frozen=True)
class RunEvent:
    """A fault that was counted between two records, such as the replacement of a lost worker."""

    env_steps: int
    seconds: float
    text: str


@dataclass(frozen=True)
class RunView:
    """View of a run, made from its files. All texts are untrusted, and every renderer escapes them.

    Attributes:
        run_dir: The run's directory.
        state: "starting" (no record yet), "running", "silent" (no record for long; perhaps killed) or "ended".
        age_s: Seconds since the latest record was written; None before the first record.
        run: Contents of `run.json`.
        result: Contents of `result.json`; empty unless the run has ended.
        latest: The latest record; empty before the first record.
        workers: Gradient workers, each followed by its collection workers.
        rates: Rates per second, by name: collected_steps, consumed_steps, updates, gradients, weight_pushes, bytes_in,
            bytes_out. A rate that is not known yet is missing.
        shares: How the workers at each level of the worker tree spend their time: the share of each part of the work,
            in [0, 1], over about the last 10 seconds.
        waits: The waits of the workers at each level, the longest wait first.
        bottleneck: A sentence that says which work limits the run; empty before the first update.
        events: Faults, such as replaced workers and skipped updates, in order.
        records: All records that were read, for curves.
        problems: A sentence about each damaged file; the view leaves out the damaged contents.
    """

    run_dir: Path
    state: str
    age_s: float | None
    run: Record
    result: Record
    latest: Record
    workers: tuple[WorkerView, ...]
    rates: Mapping[str, float]
    shares: Mapping[str, Mapping[str, float]]
    waits: tuple[Wait, ...]
    bottleneck: str
    events: tuple[RunEvent, ...]
    records: tuple[Record, ...]
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.run_dir.name or str(self.run_dir)

    @property
    def algorithm(self) -> str:
        """The algorithm's name; empty if `run.json` does not contain the arguments of `train`."""
        return text(self.run, "recipe", "algorithm")

    @property
    def env(self) -> str:
        """The environment's id; empty if `run.json` does not contain the arguments of `train`."""
        return text(self.run, "recipe", "env")

    @property
    def env_steps(self) -> int:
        """Number of env steps that have reached the learner."""
        return count(self.result, "env_steps") or count(self.latest, "env_steps")

    @property
    def target_steps(self) -> int:
        """Number of env steps after which the run ends."""
        return count(self.run, "target_steps")

    @property
    def return_mean(self) -> float | None:
        """Mean raw return of the last 100 training episodes; None before an episode has ended."""
        return number(self.latest, "return_mean")

    @property
    def eval_return(self) -> float | None:
        """Mean raw return of the latest evaluation; None before the first evaluation."""
        return number(self.latest, "evaluation", "return_mean")

    @property
    def findings(self) -> list[RunFinding]:
        """The findings about the run: what looks wrong, the most serious first."""
        return find(self.latest, self.target_steps, has_ended=self.state == "ended")

    @property
    def policy_lag(self) -> Lag | None:
        """The policy lag since the start of the run; None if the latest record does not contain it."""
        return _lag(item(self.latest, "policy_lag"))

    @property
    def grad_lag(self) -> Lag | None:
        """The gradient lag in the latest record; None if the record does not contain it."""
        return _lag(item(self.latest, "scheme", "grad_lag"))

    @property
    def lag_histogram(self) -> tuple[tuple[int, int], ...]:
        """The histogram of policy lags, as a pair (smallest lag, count) for each bin."""
        found = [row for row in rows(self.latest, "scheme", "policy_lag_histogram")
                 if isinstance(row, list) and len(row) == 2 and all(type(value) is int for value in row)]
        return tuple((lag, number) for lag, number in found)

    @property
    def dropped(self) -> dict[str, int]:
        """The number of dropped env steps by reason; reasons without steps are missing."""
        reasons = mapping(self.latest, "ledger", "dropped")
        return {reason: steps for reason in reasons if (steps := count(reasons, reason))}

    @property
    def queue(self) -> tuple[int, int, float | None, int]:
        """The train batches in the queue: current number, capacity, mean number (None if unknown), and peak.

        With replay shards, the numbers are those of the batches from shards that wait for the learner.
        """
        return (count(self.latest, "scheme", "queue_size"), count(self.run, "scheme", "queue_size"),
                number(self.latest, "scheme", "queue", "mean"), self.metric("queue_peak"))

    def setting(self, name: str) -> str:
        """Return a setting of the scheme as text; empty if the scheme has no such setting."""
        return text(self.run, "scheme", name)

    def metric(self, name: str) -> int:
        """Return the scheme's counter `name` from the latest record; 0 if the record lacks it."""
        return count(self.latest, "scheme", name)

    def curve(self, *path: str) -> list[tuple[float, float]]:
        """Return (env steps, value) for each record in which the nested keys `path` lead to a number."""
        points = ((number(record, "env_steps"), number(record, *path)) for record in self.records)
        return [(x, y) for x, y in points if x is not None and y is not None]


class Reader:
    """Reader of one run, which may still be running.

    Args:
        run_dir: The directory of the run; `reading.check_run` must accept it.
        only_latest: Whether to keep only the latest records, for callers that do not draw curves.
        curve: The number in the records whose curve is kept, in place of the records; "": none.
    """

    def __init__(self, run_dir: Path, *, only_latest: bool = False, curve: str = "") -> None:
        self._run_dir, self._only_latest, self._name = run_dir, only_latest, curve
        self._source = Records(run_dir, only_latest=only_latest)
        self._records: list[Record] = []
        self.curve: list[tuple[float, float]] = []
        """(env steps, value) of each record that has the number."""

    def read(self, now: float | None = None) -> RunView:
        """Return the view of the run at the time `now` (in seconds since the epoch; default: the current time)."""
        now = time.time() if now is None else now
        (result, in_result), (run, in_run) = (read_checked(self._run_dir / name) for name in (RESULT_FILE, RUN_FILE))
        new = self._source.read()
        self._records = new if self._source.has_restarted else self._records + new
        if self._name:
            points = ((number(record, "env_steps"), number(record, self._name)) for record in new)
            self.curve = (([] if self._source.has_restarted else self.curve)
                          + [(x, y) for x, y in points if x is not None and y is not None])
        if self._name and len(self._records) > _KEPT_FOR_RATES + 1:
            self._records = [_before(self._records), *self._records[-_KEPT_FOR_RATES:]]
        elif self._only_latest:
            self._records = self._records[-_MOST_KEPT:]
        written_at = self._source.written_at
        age_s = None if written_at is None or not self._records else max(0.0, now - written_at)
        problems = tuple(filter(None, (in_run, in_result, self._problem(result))))
        return replace(view_of(self._run_dir, run, result, self._records, age_s), problems=problems)

    def _problem(self, result: Record) -> str:
        """Return a sentence that says how `metrics.jsonl` is damaged; empty if it is not."""
        source, path = self._source, str(self._run_dir / METRICS_FILE)
        if source.num_damaged:
            return f"{path!r} is damaged: lines that are no records were left out: {source.num_damaged}"
        problem = problem_of_records(result, source.num_bytes, source.sha256)
        return f"{path!r} {problem}" if problem else ""


def read_run(run_dir: Path) -> RunView:
    """Return the view of a run with all its records; raise `ConfigError` if the directory contains no run."""
    check_run(run_dir)
    return Reader(run_dir).read()


def view_of(
    run_dir: Path, run: Record, result: Record, records: Sequence[Record], age_s: float | None,
) -> RunView:
    """Return the view of a run from the contents of its files."""
    latest = records[-1] if records else {}
    before = _before(records)
    seconds = (number(latest, "seconds") or 0.0) - (number(before, "seconds") or 0.0)
    shares = _shares(before, latest)
    return RunView(
        run_dir=run_dir, state=_state(result, records, age_s), age_s=age_s, run=run, result=result, latest=latest,
        workers=_workers(before, latest, seconds), rates=_rates(before, latest, seconds), shares=shares,
        waits=_waits(shares, mapping(run, "scheme"), latest), bottleneck=_bottleneck(shares, mapping(run, "scheme")),
        events=_events(records), records=tuple(records))


def _state(result: Record, records: Sequence[Record], age_s: float | None) -> str:
    if result:
        return "ended"
    if not records or age_s is None:
        return "starting"
    times = [number(record, "seconds") or 0.0 for record in records[-10:]]
    longest = max((after - before for before, after in itertools.pairwise(times)), default=0.0)
    return "silent" if age_s > max(_SILENT_S, _SILENT_FACTOR * longest) else "running"


def _before(records: Sequence[Record]) -> Record:
    """Return the earlier record with which the latest record is compared to compute rates.

    The earlier record is the newest one that is at least `_WINDOW_S` seconds older than the latest record, or the
    oldest record if no record is that old. If there is only one record, or if the run was resumed after the earlier
    record, return an empty record, in which all counts are 0: the counts of a resumed run start at 0 again.
    """
    if len(records) < 2:
        return {}
    latest, found = records[-1], records[0]
    end = number(latest, "seconds") or 0.0
    for record in reversed(records[:-1]):
        if count(record, "scheme", "grads_received") > count(latest, "scheme", "grads_received"):
            return {}
        if end - (number(record, "seconds") or 0.0) >= _WINDOW_S:
            found = record
            break
    return found


def _rate(before: float | None, after: float | None, seconds: float) -> float | None:
    if after is None or seconds <= 0 or after < (before or 0.0):
        return None
    return (after - (before or 0.0)) / seconds


def _rates(before: Record, latest: Record, seconds: float) -> dict[str, float]:
    names = {"updates": ("updates",), "collected_steps": ("ledger", "collected"),
             "consumed_steps": ("ledger", "consumed"), "gradients": ("scheme", "grads_received"),
             "weight_pushes": ("scheme", "weight_pushes"), "bytes_in": ("scheme", "bytes_in"),
             "bytes_out": ("scheme", "bytes_out")}
    found = {name: _rate(number(before, *path), number(latest, *path), seconds) for name, path in names.items()}
    return {name: rate for name, rate in found.items() if rate is not None}


def _workers(before: Record, latest: Record, seconds: float) -> tuple[WorkerView, ...]:
    earlier = {text(row, "worker"): row for row in rows(before, "scheme", "by_worker")}
    return tuple(_worker(row, earlier.get(text(row, "worker")), seconds)
                 for row in rows(latest, "scheme", "by_worker") if isinstance(row, dict))


def _worker(row: Record, before: object, seconds: float) -> WorkerView:
    total = "env_steps" if "env_steps" in row else "gradients"
    return WorkerView(
        name=text(row, "worker"), is_collector=total == "env_steps", total=count(row, total),
        rate=_rate(number(before, total), number(row, total), seconds), restarts=count(row, "restarts"),
        lag=_lag(item(row, "policy_lag")))


def _lag(summary: object) -> Lag | None:
    mean, p90, largest = (number(summary, name) for name in ("mean", "p90", "max"))
    return None if mean is None or p90 is None or largest is None else Lag(mean, p90, largest)


def _shares(before: Record, latest: Record) -> dict[str, dict[str, float]]:
    time_s = {}
    for level in _LEVELS:
        after = mapping(latest, "scheme", "time_s", level)
        time_s[level] = {part: max(0.0, (number(after, part) or 0.0)
                                   - (number(before, "scheme", "time_s", level, part) or 0.0)) for part in after}
    return time_shares.shares(time_s)


def _bottleneck(shares: Mapping[str, Mapping[str, float]], settings: Record) -> str:
    try:
        return time_shares.bottleneck(shares, settings)[2]
    except (KeyError, ValueError):  # there is no update yet, or the record lacks a part of the work
        return ""


def _waits(shares: Mapping[str, Mapping[str, float]], settings: Record, latest: Record) -> tuple[Wait, ...]:
    """Return the waits that take at least `_MIN_WAIT_SHARE` of the waiting workers' time, the longest wait first."""
    data = "batches from the replay shards" if settings.get("num_replay_workers") else "rollouts"
    level, size = number(latest, "scheme", "queue", "mean") or 0.0, number(settings, "queue_size")
    is_full = settings.get("col_communication") == "asynchronous" and size and level >= _FULL * size
    collect = "room in the queue" if is_full else "requests from their gradient worker"
    causes = (
        ("update", "wait", "gradients"), ("update", "idle", "the program that calls step()"),
        ("gradients", "wait", data), ("gradients", "average", "the slowest gradient worker, including the averaging"),
        ("gradients", "idle", "the update worker"), ("collection", "idle", collect))
    found = [Wait(_WHO[level], whom, shares.get(level, {}).get(part, 0.0)) for level, part, whom in causes]
    return tuple(sorted((wait for wait in found if wait.share >= _MIN_WAIT_SHARE), key=lambda wait: -wait.share))


def _events(records: Sequence[Record]) -> tuple[RunEvent, ...]:
    """Return an event for each fault counter that increased between two consecutive records."""
    names = (("workers_restarted", "lost workers restarted"), ("envs_restarted", "environments restarted"),
             ("episodes_approximated", "episodes cut off whose last observation was unknown"),
             ("updates_skipped_nan", "updates skipped because they were not finite"))
    found: list[RunEvent] = []
    before: Record = {}
    for record in records:
        for name, what in names:
            more = count(record, "scheme", name) - count(before, "scheme", name)
            if more > 0:
                who = _restarted(before, record) if name == "workers_restarted" else ""
                found.append(RunEvent(count(record, "env_steps"), number(record, "seconds") or 0.0,
                                      f"{what}: {more}{f' ({who})' if who else ''}"))
        missing = count(record, "scheme", "workers_missing")
        if missing > count(before, "scheme", "workers_missing"):
            found.append(RunEvent(count(record, "env_steps"), number(record, "seconds") or 0.0,
                                  f"{missing} of {count(record, 'scheme', 'workers')} workers missing"))
        before = record
    return tuple(found)


def _restarted(before: Record, record: Record) -> str:
    earlier = {text(row, "worker"): count(row, "restarts") for row in rows(before, "scheme", "by_worker")}
    return ", ".join(text(row, "worker") for row in rows(record, "scheme", "by_worker")
                     if count(row, "restarts") > earlier.get(text(row, "worker"), 0))
