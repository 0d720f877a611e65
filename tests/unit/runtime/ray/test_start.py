"""Tests of starting Ray without unused processes, with a fake module `ray`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytorchrl.runtime.ray.start import without_unused_processes


@pytest.fixture
def node():
    """Return a class that records which of its methods are called."""
    class Node:
        started = ()

        def start_gcs_server(self):
            self.started += ("gcs",)

        def start_api_server(self, *, include_dashboard, raise_on_failure):
            self.started += ("api",)

        def start_monitor(self):
            self.started += ("monitor",)

        def start_log_monitor(self):
            self.started += ("log monitor",)

        def start(self):
            self.start_gcs_server()
            self.start_api_server(include_dashboard=False, raise_on_failure=False)
            self.start_monitor()
            self.start_log_monitor()
            return self.started
    return Node


def test_unused_processes_do_not_start_and_later_nodes_start_them(node):
    ray = SimpleNamespace(_private=SimpleNamespace(node=SimpleNamespace(Node=node)))
    with without_unused_processes(ray):
        assert node().start() == ("gcs",)
    assert node().start() == ("gcs", "api", "monitor", "log monitor")


def test_a_failed_start_restores_the_methods(node):
    ray = SimpleNamespace(_private=SimpleNamespace(node=SimpleNamespace(Node=node)))
    with pytest.raises(KeyError, match="init"), without_unused_processes(ray):
        raise KeyError("init")
    assert node().start() == ("gcs", "api", "monitor", "log monitor")


@pytest.mark.parametrize("missing", ["start_api_server", "start_monitor", "start_log_monitor"])
def test_a_ray_without_a_method_is_not_changed(node, missing):
    delattr(node, missing)
    with without_unused_processes(SimpleNamespace(_private=SimpleNamespace(node=SimpleNamespace(Node=node)))):
        assert not hasattr(node, missing)
    assert not hasattr(node, missing)
    with without_unused_processes(SimpleNamespace(_private=SimpleNamespace())):
        assert hasattr(node, "start_gcs_server")
