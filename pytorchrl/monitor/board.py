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
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pytorchrl.errors import ConfigError
from pytorchrl.files.run_directory import RUN_FILE
from pytorchrl.monitor.charts import sparkline
from pytorchrl.monitor.page import document, report, state_of
from pytorchrl.monitor.style import REFRESH, TOGGLE, policy
from pytorchrl.monitor.view import Reader, RunView, read_run
from pytorchrl.support.display import escape
from pytorchrl.support.units import compact, percent

ADDRESS = "127.0.0.1"
_DEPTH, _MOST_RUNS = 3, 1000
_SCRIPT = TOGGLE + REFRESH


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
        # guards `_readers`, which matches the last search: self._readers.keys() == find_runs(root).keys()
        self._lock = threading.Lock()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"port {port} of {ADDRESS} cannot be used: {error}; choose another --port") from error

    @property
    def hosts(self) -> frozenset[str]:
        """The values of the Host header that the server accepts."""
        return frozenset(f"{name}:{self.server_port}" for name in (ADDRESS, "localhost"))

    def views(self) -> list[tuple[str, RunView]]:
        """Return (path below the root, view) of every run; each call parses only the records that are new."""
        with self._lock:
            runs = find_runs(self.root)
            self._readers = {key: self._readers.get(key) or Reader(run_dir) for key, run_dir in runs.items()}
            return [(key, reader.read()) for key, reader in self._readers.items()]

    def rows(self) -> str:
        """Return a table of all runs as HTML; the run that started last comes first."""
        found = sorted(self.views(), key=lambda one: str(one[1].run.get("started", "")), reverse=True)
        if not found:
            return '<p class="none">no runs yet</p>'
        head = "".join(f"<th{' class=n' if number else ''}>{name}</th>" for name, number in (
            ("run", 0), ("state", 0), ("algorithm", 0), ("environment", 0), ("steps", 1), ("done", 1), ("steps/s", 1),
            ("return", 1), ("", 0), ("lag", 1), ("restarts", 1), ("started", 0)))
        body = "".join(_row(key, view) for key, view in found)
        return (f'<div class="scroll wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')


def _row(key: str, view: RunView) -> str:
    lag, rate = view.policy_lag, view.rates.get("collected_steps")
    started = str(view.run.get("started", ""))[:16].replace("T", " ")
    share = min(1.0, view.env_steps / view.target_steps) if view.target_steps else 0.0
    cells = (
        ("k", f'<a href="/run/{escape(urllib.parse.quote(key, safe=""))}">{escape(key)}</a>'), ("k", state_of(view)),
        ("", escape(view.algorithm)), ("", escape(view.env)), ("n", f"{view.env_steps:,}"), ("n", percent(share)),
        ("n", escape(compact(rate))), ("n", "-" if view.return_mean is None else f"{view.return_mean:.1f}"),
        ("", sparkline(view.curve("return_mean"))), ("n", "-" if lag is None else f"{lag.mean:.1f}"),
        ("n", str(view.metric("workers_restarted"))), ("k", escape(started)))
    return "<tr>" + "".join(f'<td{f" class={kind}" if kind else ""}>{html}</td>' for kind, html in cells) + "</tr>"


class _Handler(BaseHTTPRequestHandler):
    """Handler of GET requests for the page of runs (`/`), its table alone (`/rows`), or a report (`/run/<path>`)."""

    server: Board
    server_version, sys_version = "pytorchrl", ""

    def do_GET(self) -> None:
        """Answer one GET request."""
        if self.headers.get("Host", "") not in self.server.hosts:
            self._send(HTTPStatus.FORBIDDEN, "this board answers only requests to 127.0.0.1 and localhost")
            return
        path = self.path.partition("?")[0]
        if path == "/":
            body = f'<div id="rows">{self.server.rows()}</div>'
            page = document(f"runs in {self.server.root}", body, _SCRIPT, '<span id="note" class="silent"></span> ')
            self._send(HTTPStatus.OK, page, script=_SCRIPT)
        elif path == "/rows":
            self._send(HTTPStatus.OK, self.server.rows(), script="")
        elif path.startswith("/run/"):
            self._report(urllib.parse.unquote(path.removeprefix("/run/"), errors="replace"))
        else:
            self._send(HTTPStatus.NOT_FOUND, "no such page")

    def _report(self, key: str) -> None:
        run_dir = find_runs(self.server.root).get(key)
        if run_dir is None:
            self._send(HTTPStatus.NOT_FOUND, "no such run")
            return
        try:
            self._send(HTTPStatus.OK, report([read_run(run_dir)]), script=TOGGLE)
        except ConfigError:  # the run was renamed or removed a moment ago
            self._send(HTTPStatus.NOT_FOUND, "no such run")

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
