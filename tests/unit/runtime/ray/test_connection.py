"""Tests of starting, sharing and leaving a Ray instance, with a fake module `ray`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytorchrl.errors import RayConnectionError
from pytorchrl.runtime.ray import connection as ray_connection
from pytorchrl.runtime.ray.connection import Connection
from tests.conftest import ManualClock


@pytest.fixture
def make_ray(monkeypatch, tmp_path):
    """Return a function that makes a fake module `ray`; each start takes the given seconds, and fails if it has a text.

    The fixture also replaces the reaper, which would wait for the end of this process, and Ray's directory.
    """
    reaped = []

    class Reaper:
        stdin = None

        def communicate(self, told, timeout):
            reaped.append(told)
    monkeypatch.setattr(ray_connection.tempfile, "mkdtemp", lambda **options: str(tmp_path))
    monkeypatch.setattr(ray_connection, "start_reaper", lambda directory: Reaper())
    monkeypatch.setattr(ray_connection, "Watch", lambda on_lost: SimpleNamespace(problem="", close=lambda: None))
    monkeypatch.setattr(Connection, "current", None)

    def make(*starts):
        clock, log = ManualClock(), SimpleNamespace(starts=[], shutdowns=0, reaped=reaped)

        def init(*, _temp_dir, **options):
            seconds, problem = starts[len(log.starts)]
            log.starts.append(options)
            clock.seconds += seconds
            if problem is not None:
                logs = Path(_temp_dir) / "session_2026" / "logs"
                logs.mkdir(parents=True, exist_ok=True)
                (logs / "gcs_server.out").write_text("first\nsecond\nthird\nwaiting for a core\n")
                raise TimeoutError(problem)

        def shutdown():
            log.shutdowns += 1
        ray = SimpleNamespace(
            init=init, shutdown=shutdown, _private=SimpleNamespace(utils=SimpleNamespace(), services=SimpleNamespace()))
        return ray, clock, log
    return make


def test_a_slow_start_is_tried_once_more(make_ray):
    ray, clock, log = make_ray((90.0, "no answer"), (5.0, None))
    told = []
    connection = Connection.start(ray, told.append, clock)
    assert told == ["Ray did not start within 90 s; starting it once more ..."]
    assert len(log.starts) == 2
    assert log.shutdowns == len(log.reaped) == 1  # the first attempt was cleaned up before the second
    assert {options["_node_ip_address"] for options in log.starts} == {"127.0.0.1"}
    connection.leave(ray)
    assert log.shutdowns == len(log.reaped) == 2
    assert Connection.current is None


def test_two_slow_starts_are_an_error_that_states_what_was_seen(make_ray):
    ray, clock, log = make_ray((90.0, "no answer"), (60.0, "no socket"))
    with pytest.raises(RayConnectionError) as caught:
        Connection.start(ray, lambda text: None, clock)
    text = str(caught.value)
    assert "attempt 1 failed after 90 s (load" in text
    assert f"on {os.cpu_count()} cores): TimeoutError: no answer" in text
    assert "attempt 2 failed after 60 s" in text
    assert "gcs_server.out: waiting for a core" in text
    assert "gcs_server.out: third" not in text
    assert re.search(r"; try again, or give runtime='processes', which starts workers .* without Ray; attempt 1", text)
    assert len(text.splitlines()) == 3  # one line for each log of each attempt
    assert len(log.starts) == log.shutdowns == len(log.reaped) == 2
    assert Connection.current is None


def test_an_immediate_failure_is_not_tried_again(make_ray):
    ray, clock, log = make_ray((1.0, "no space left on device"))
    with pytest.raises(RayConnectionError, match=r"attempt 1 failed after 1 s .*no space left"):
        Connection.start(ray, lambda text: None, clock)
    assert len(log.starts) == log.shutdowns == 1


def test_an_interrupted_start_is_cleaned_up(make_ray):
    ray, clock, log = make_ray((1.0, None))
    ray.init = lambda **options: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        Connection.start(ray, lambda text: None, clock)
    assert log.shutdowns == 1
    assert Connection.current is None


def test_the_last_user_of_a_connection_leaves_ray(make_ray):
    ray, clock, log = make_ray((5.0, None))
    assert Connection.share() is None  # the user has started Ray
    first = Connection.start(ray, lambda text: None, clock)
    second = Connection.share()
    assert second is first
    first.leave(ray)
    assert log.shutdowns == 0
    second.leave(ray)
    assert log.shutdowns == 1


def test_a_program_that_ends_without_leaving_ray_leaves_it_at_its_end(make_ray, monkeypatch):
    """Check the order at the end of a program: the watch would report that Ray's own shutdown ends Ray's parts."""
    ray, clock, log = make_ray((5.0, None), (5.0, None))
    registered, order = [], []
    monkeypatch.setattr(ray_connection, "atexit", SimpleNamespace(
        register=lambda function, *args: registered.append((function, args)),
        unregister=lambda function: None))
    monkeypatch.setattr(ray_connection, "Watch", lambda on_lost: SimpleNamespace(
        problem="", close=lambda: order.append(f"watch ended after {log.shutdowns} shutdowns")))
    Connection.start(ray, lambda text: None, clock)
    (function, args), = registered
    function(*args)
    assert order == ["watch ended after 0 shutdowns"]
    assert log.shutdowns == 1
    assert log.reaped == [b"\n"]  # so that the reaper prints nothing


def test_leaving_ray_leaves_nothing_to_do_at_the_end_of_the_program(make_ray, monkeypatch):
    ray, clock, _ = make_ray((5.0, None))
    registered = set()
    monkeypatch.setattr(ray_connection, "atexit", SimpleNamespace(
        register=lambda function, *args: registered.add(function), unregister=registered.discard))
    connection = Connection.start(ray, lambda text: None, clock)
    assert len(registered) == 1
    connection.leave(ray)
    assert registered == set()


def test_the_umask_is_restored_after_a_start(make_ray):
    ray, clock, _ = make_ray((5.0, None))
    seen = []
    init = ray.init

    def watched(**options):
        seen.append((os.umask(0o077), os.environ["PYTORCHRL_UMASK"]))
        init(**options)
    ray.init = watched
    before = os.umask(0o022)
    try:
        Connection.start(ray, lambda text: None, clock).leave(ray)
        assert seen == [(0o077, str(0o022))]
        assert os.umask(0o022) == 0o022
        assert "PYTORCHRL_UMASK" not in os.environ
    finally:
        os.umask(before)
