"""Tests of the server: its address, what it answers and what it refuses."""

from __future__ import annotations

import http.client
import threading

import pytest

from pytorchrl.errors import ConfigError
from pytorchrl.monitor.board import Board, find_runs
from tests.unit.monitor.runs import HOSTILE, hostile_run, make_run, usual_records


@pytest.fixture
def board(tmp_path):
    make_run(tmp_path / "secret", usual_records())
    root = tmp_path / "runs"
    make_run(root / "a", usual_records())
    make_run(root / "sweep" / "b", usual_records(), result={"env_steps": 4000})
    hostile_run(root / HOSTILE.replace("/", ""))
    (root / "link").symlink_to(tmp_path / "secret")
    with Board(root) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(board, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", board.server_port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def test_the_board_listens_on_this_machine_only(board):
    assert board.socket.getsockname()[0] == "127.0.0.1"


def test_the_list_links_to_reports(board):
    answer, body = ask(board, "/")
    assert answer.status == 200
    assert board._readers.keys() == find_runs(board.root).keys()
    assert 'href="/run/a"' in body
    assert 'href="/run/sweep%2Fb"' in body
    assert "link" not in find_runs(board.root)
    for path, name in (("/run/a", "<title>a</title>"), ("/run/sweep%2Fb", "<title>b</title>")):
        answer, body = ask(board, path)
        assert answer.status == 200
        assert name in body


def test_the_rows_follow_the_runs(board):
    assert "new" not in ask(board, "/rows")[1]
    make_run(board.root / "new", usual_records())
    assert 'href="/run/new"' in ask(board, "/rows")[1]
    (board.root / "new" / "run.json").unlink()
    assert 'href="/run/new"' not in ask(board, "/rows")[1]


@pytest.mark.parametrize("path", [
    "/run/../secret", "/run/..%2Fsecret", "/run/%2e%2e/secret", "/run/%2Fetc%2Fpasswd", "/run/link", "/run/",
    "/run/none", "/run/a%00", "/run/%ff", "/etc/passwd", "/rows/"])
def test_other_paths_are_not_found(board, path):
    answer, body = ask(board, path)
    assert answer.status == 404
    assert body in ("no such run", "no such page")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "localhost:1", ""])
@pytest.mark.parametrize("path", ["/", "/rows", "/run/a"])
def test_foreign_host_headers_are_refused(board, host, path):
    answer, body = ask(board, path, Host=host)
    assert answer.status == 403
    assert "CartPole" not in body


def test_localhost_is_answered(board):
    assert ask(board, "/", Host=f"localhost:{board.server_port}")[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_written(board, method):
    assert ask(board, "/run/a", method)[0].status == 501


def test_hostile_texts_are_escaped_and_scripts_are_limited(board):
    answer, body = ask(board, "/")
    assert "<img" not in body
    assert "&lt;img" in body
    assert "\x1b" not in body
    assert "default-src 'none'; script-src 'sha256-" in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_a_missing_directory_and_a_used_port_are_errors(board, tmp_path):
    with pytest.raises(ConfigError, match="needs a directory of runs"):
        Board(tmp_path / "none")
    with pytest.raises(ConfigError, match="choose another --port"):
        Board(board.root, board.server_port)
