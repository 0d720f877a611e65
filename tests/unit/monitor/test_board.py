"""Tests of the server: its address, what it answers and what it refuses."""

from __future__ import annotations

import http.client
import json
import re
import threading

import pytest

from pytorchrl.errors import ConfigError
from pytorchrl.monitor.board import Board, find_runs
from tests.unit.monitor.runs import HOSTILE, hostile_run, make_run, record, usual_records


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
    answer, page = ask(board, "/")
    assert answer.status == 200
    assert "<title>runs in runs</title>" in page
    assert "<tr>" not in page  # the page comes before any run is read; its script asks for the rows
    answer, body = ask(board, "/rows")
    assert answer.status == 200
    assert board._readers.keys() == find_runs(board.root).keys()
    assert 'href="/run/a"' in body
    assert 'href="/run/sweep%2Fb"' in body
    assert "link" not in find_runs(board.root)
    for path, name in (("/run/a", "<title>a</title>"), ("/run/sweep%2Fb", "<title>b</title>")):
        answer, body = ask(board, path)
        assert answer.status == 200
        assert name in body
        assert '<a href="/">← all runs</a>' in body


def test_several_runs_are_compared(board):
    answer, body = ask(board, "/compare?run=a&run=sweep%2Fb&run=a")
    assert answer.status == 200
    assert "<title>2 runs on CartPole-v1</title>" in body
    assert '<a href="/">← all runs</a>' in body
    for path in ("/compare", "/compare?run=", "/compare?run=a&run=..%2Fsecret", "/compare?run=link"):
        assert ask(board, path)[0].status == 404


def test_curves_of_one_environment_have_one_scale(board):
    records = usual_records()
    for one in records:
        one["return_mean"] += 60.0
    make_run(board.root / "high", records)
    body = ask(board, "/rows")[1]
    assert "The curves of an environment have one scale, " in body
    assert "CartPole-v1 15 to 100." in body
    heights = [re.search(f'value="{name}".*?points="([^"]*)"', body)[1].split() for name in ("a", "high")]
    assert [points[-1] for points in heights] == ["118,16.1", "118,2.0"]


def test_the_rows_can_be_sorted_and_say_what_looks_wrong(board):
    records = usual_records()
    records[-1]["ledger"] |= {"collected": 4000, "dropped": {"policy_lag": 3300}}
    make_run(board.root / "bad", records, result={"env_steps": 4000})
    body = ask(board, "/rows")[1]
    assert '<table class="sorted">' in body
    assert 'data-v="0.825"><span class=bad>82%</span>' in body
    assert '<b class="bad" title="3,300 of 4,000 env steps were dropped' in body
    assert body.count('type="checkbox"') == 4


def test_a_run_that_has_ended_is_read_again_only_if_a_file_changes(board):
    first, second = ({key: view for key, _, view in board.views()} for _ in range(2))
    assert first["sweep/b"] is second["sweep/b"]
    assert first["a"] is not second["a"]  # it has not ended
    make_run(board.root / "sweep" / "b", usual_records()[:2], result={"env_steps": 1500})
    assert {key: view for key, _, view in board.views()}["sweep/b"].return_mean == 25.0
    (board.root / "sweep" / "b" / "run.json").unlink()
    board.views()
    assert board._ended == {}


def test_the_board_keeps_curves_but_few_records(board):
    records = [record(at, 10 * at) for at in range(1, 200)]
    make_run(board.root / "long", records)
    body = ask(board, "/rows")[1]
    assert "209.0" in body
    (reader,) = [reader for key, reader in board._readers.items() if key == "long"]
    assert len(reader.curve) == 199
    assert len(reader._records) == 11
    with (board.root / "long" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(200, 2000)) + "\n")
    assert "210.0" in ask(board, "/rows")[1]
    assert len(reader.curve) == 200
    assert reader.read().rates["collected_steps"] == pytest.approx(10.0)


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
@pytest.mark.parametrize("path", ["/", "/rows", "/run/a", "/compare?run=a"])
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
    answer, body = ask(board, "/rows")
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
