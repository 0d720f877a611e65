"""Serve a read-only web page on 127.0.0.1 that lists runs; the report of a run is made when it is requested.

A request names a run by its path below the directory of runs. The server looks the path up in the list of runs that it
found, and never joins the path to a directory, so a request cannot reach other files. The server accepts only
requests whose Host header names 127.0.0.1 or localhost. Otherwise, another web page in the user's browser could read
this server through a host name that resolves to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import os
import threading
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pytorchrl.errors import ConfigError
from pytorchrl.files.reading import number
from pytorchrl.files.run_directory import METRICS_FILE, RESULT_FILE, RUN_FILE
from pytorchrl.monitor.charts import Points, sparkline
from pytorchrl.monitor.findings import dropped_share
from pytorchrl.monitor.page import document, report
from pytorchrl.monitor.run_section import state_of
from pytorchrl.monitor.series import groups_of
from pytorchrl.monitor.style import board_script, policy, report_script, style
from pytorchrl.monitor.tables import Cell, clamped, figures, share_of_drops, sorted_table, words
from pytorchrl.monitor.view import Reader, RunView, read_run
from pytorchrl.support.display import escape
from pytorchrl.support.units import compact, percent, score

ADDRESS = "127.0.0.1"
_DEPTH, _MOST_RUNS = 3, 1000
_RETURN = "return_mean"
FileStates = tuple[tuple[int, int, int] | None, ...]
# The page is sent before any file of a run is read, so that it appears at once; its script then asks for the rows.
_TOOLS = (
    '<div class="bar-tools board"><input type="search" id="filter" placeholder="filter: words in any column" '
    'aria-label="filter"><span id="shown" class="dim"></span>'
    '<button type="button" id="compare" disabled>compare</button><button type="button" id="all">select shown</button>'
    '<button type="button" id="none">select none</button></div>'
    '<div id="rows"><p class="none">reading runs …</p></div>')


def find_runs(root: Path) -> dict[str, Path]:
    """Return the directory of each run up to three levels below `root`, by relative path; ignore symbolic links."""
    return dict(sorted(_runs_below(root, root, _DEPTH))[:_MOST_RUNS])


def _runs_below(root: Path, folder: Path, depth: int) -> Iterator[tuple[str, Path]]:
    if (folder / RUN_FILE).is_file():
        yield folder.relative_to(root).as_posix(), folder
        return
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)] if depth else []
    except OSError:
        return
    for entry in entries:
        yield from _runs_below(root, folder / entry.name, depth - 1)


class Board(ThreadingHTTPServer):
    """HTTP server of the list of runs and of their reports; `serve_forever` runs it, and `server_port` is its port.

    Args:
        root: The directory of runs.
        port: The port; 0: a free port.

    Raises:
        ConfigError: `root` is not a directory, or the port is in use.
    """

    daemon_threads = True

    def __init__(self, root: Path, port: int = 0) -> None:
        if not root.is_dir():
            raise ConfigError(f"board needs a directory of runs, such as runs/; {str(root)!r} is not a directory")
        self.root = root
        self._readers: dict[str, Reader] = {}
        self._ended: dict[str, tuple[FileStates, RunView]] = {}
        # guards `_readers` and `_ended`; after a search, self._readers.keys() == find_runs(root).keys(), and `_ended`
        # contains only such keys
        self._lock = threading.Lock()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"port {port} of {ADDRESS} cannot be used: {error}; choose another --port") from error

    @property
    def hosts(self) -> frozenset[str]:
        """The values of the Host header that the server accepts."""
        return frozenset(f"{name}:{self.server_port}" for name in (ADDRESS, "localhost"))

    def views(self) -> list[tuple[str, Reader, RunView]]:
        """Return (path below the root, reader, view) of every run; each call parses only the records that are new."""
        with self._lock:
            runs = find_runs(self.root)
            self._readers = {key: self._readers.get(key) or Reader(run_dir, curve=_RETURN)
                             for key, run_dir in runs.items()}
            self._ended = {key: found for key, found in self._ended.items() if key in runs}
            return [(key, reader, self._view(key, reader, runs[key])) for key, reader in self._readers.items()]

    def _view(self, key: str, reader: Reader, run_dir: Path) -> RunView:
        """Return the view of a run; that of a run that has ended is kept until one of its files changes."""
        state = _state_of_files(run_dir)
        kept = self._ended.get(key)
        if kept is not None and kept[0] == state:
            return kept[1]
        view = reader.read()
        if view.state == "ended":
            self._ended[key] = state, view
        return view

    def rows(self) -> str:
        """Return a table of all runs as HTML; the run that started last comes first."""
        found = sorted(self.views(), key=lambda one: str(one[2].run.get("started", "")), reverse=True)
        if not found:
            return '<p class="none">no runs yet</p>'
        ends = _ends_of(found)
        labels = _labels_of([view for _, _, view in found])
        head = (("", False), ("run", False), ("return", True), ("", False), ("looks wrong", False), ("state", False),
                ("algorithm", False), ("environment", False), ("differs in", False), ("steps", True),
                ("done", True), ("steps/s", True), ("lag", True), ("dropped", True), ("started", False))
        scales = ", ".join(f"{env} {compact(low)} to {compact(high)}" for env, (low, high) in sorted(ends.items()))
        note = f'<p class="dim">The curves of an environment have one scale, {escape(scales)}.</p>' if ends else ""
        return sorted_table(head, (_row(key, view, reader.curve, ends.get(view.env), labels.get(view.run_dir, ""))
                                   for key, reader, view in found)) + note


def _state_of_files(run_dir: Path) -> FileStates:
    """Return inode, size and modification time of each file of a run; None if the file is missing."""
    return tuple(_state_of_file(run_dir / name) for name in (RUN_FILE, METRICS_FILE, RESULT_FILE))


def _state_of_file(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _ends_of(found: Iterable[tuple[str, Reader, RunView]]) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest return of all runs on each environment."""
    ends: dict[str, tuple[float, float]] = {}
    for _, reader, view in found:
        values = [value for _, value in reader.curve]
        if values:
            low, high = ends.get(view.env, (values[0], values[0]))
            ends[view.env] = min(low, *values), max(high, *values)
    return ends


def _labels_of(views: Sequence[RunView]) -> dict[Path, str]:
    """Return the settings in which each run differs from others of its algorithm and environment, in short."""
    return {member.view.run_dir: group.label.removeprefix(f"{group.env}: ").removeprefix(member.view.algorithm).strip()
            for group in groups_of(views) for member in group.members}


def _row(key: str, view: RunView, curve: Points, ends: tuple[float, float] | None, label: str) -> list[Cell]:
    lag, rate, name = number(view.latest, "policy_lag", "mean"), view.rates.get("collected_steps"), escape(key)
    share = min(1.0, view.env_steps / view.target_steps) if view.target_steps else 0.0
    dropped, wrong = dropped_share(view.latest), "; ".join(finding.sentence for finding in view.findings)
    words_of = ", ".join(finding.word for finding in view.findings)
    return [
        Cell(f'<input type="checkbox" value="{name}" aria-label="select {name}">'),
        Cell(f'<a href="/run/{escape(urllib.parse.quote(key, safe=""))}">{name}</a>'),
        figures(score(view.return_mean), view.return_mean), Cell(sparkline(curve, *ends) if ends else ""),
        Cell(f'<b class="bad" title="{escape(wrong)}">{escape(words_of)}</b>' if wrong else ""),
        Cell(state_of(view)), words(view.algorithm), words(view.env), Cell(clamped(label), None, "label"),
        figures(f"{view.env_steps:,}", view.env_steps), figures(percent(share), share), figures(compact(rate), rate),
        figures(score(lag), lag), share_of_drops(dropped),
        words(str(view.run.get("started", ""))[:16].replace("T", " "))]


class _Handler(BaseHTTPRequestHandler):
    """Handler of GET requests for the page of runs (`/`), its table (`/rows`), or a report.

    Reports are at `/run/<path>`, and about several runs at `/compare?run=<path>&run=<path>`.
    """

    server: Board
    server_version, sys_version = "pytorchrl", ""

    def do_GET(self) -> None:
        """Answer one GET request."""
        if self.headers.get("Host", "") not in self.server.hosts:
            self._send(HTTPStatus.FORBIDDEN, "this board answers only requests to 127.0.0.1 and localhost")
            return
        path, _, query = self.path.partition("?")
        if path == "/":
            script = board_script()
            self._send(HTTPStatus.OK, document(
                f"runs in {self.server.root.resolve().name or self.server.root}", _TOOLS, script,
                style_sheet=style(), note='<span id="note" class="silent"></span> '), script=script)
        elif path == "/rows":
            self._send(HTTPStatus.OK, self.server.rows(), script="")
        elif path.startswith("/run/"):
            self._report([urllib.parse.unquote(path.removeprefix("/run/"), errors="replace")])
        elif path == "/compare":
            self._report(list(dict.fromkeys(urllib.parse.parse_qs(query, errors="replace").get("run", []))))
        else:
            self._send(HTTPStatus.NOT_FOUND, "no such page")

    def _report(self, keys: Sequence[str]) -> None:
        runs = find_runs(self.server.root)
        run_dirs = [run_dir for key in keys if (run_dir := runs.get(key)) is not None]
        if not run_dirs or len(run_dirs) < len(keys):
            self._send(HTTPStatus.NOT_FOUND, "no such run")
            return
        try:
            body = report([read_run(run_dir) for run_dir in run_dirs], note='<a href="/">← all runs</a> ')
        except ConfigError:  # a run was renamed or removed a moment ago
            self._send(HTTPStatus.NOT_FOUND, "no such run")
            return
        self._send(HTTPStatus.OK, body, script=report_script())

    def _send(self, status: HTTPStatus, body: str, *, script: str | None = None) -> None:
        """Send a response: plain text if `script` is None; otherwise HTML, in which only `script` may run."""
        data = body.encode("utf-8", errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"text/{'plain' if script is None else 'html'}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", policy(script or ""))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: requests are untrusted text, and the terminal belongs to the user."""
