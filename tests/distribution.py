"""Let the processes of pytest-xdist exchange fewer messages per test, and assign tests in less time."""

from __future__ import annotations

import pytest
from _pytest.runner import runtestprotocol


class BriefReports:
    """A plugin for the processes that run tests: it reports the call of a test, and setup and teardown if they fail.

    A process then sends two messages per test to the main process, instead of six. The names and markers of a test that
    has passed are not sent, either. `--durations` therefore omits setups and teardowns.
    """

    def pytest_runtest_protocol(self, item, nextitem):
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            if report.passed:
                report.keywords = {}
            if report.when == "call" or not report.passed:
                item.ihook.pytest_runtest_logreport(report=report)
        return True


class Distribution:
    """A plugin for the main process, which assigns tests to the processes that run them."""

    def __init__(self, config):
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        """Show progress, because `BriefReports` does not report the ends of tests."""
        self._config.hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)

    @pytest.hookimpl(optionalhook=True)  # only pytest-xdist has this hook
    def pytest_xdist_make_scheduler(self, config, log):
        from xdist.scheduler import LoadGroupScheduling

        class Scheduling(LoadGroupScheduling):
            """Distribute tests like `--dist loadgroup`, but forget tests that have ended.

            After each test, the class of pytest-xdist counts the pending tests among all tests that it has ever
            assigned to the process. Its time grows with the square of the number of tests.
            """

            def mark_test_complete(self, node, item_index, duration=0):
                super().mark_test_complete(node, item_index, duration)
                nodeid, assigned = self.registered_collections[node][item_index], self.assigned_work[node]
                scope = self._split_scope(nodeid)
                if all(assigned[scope].values()):
                    del assigned[scope]

        return Scheduling(config, log) if config.getoption("dist") == "loadgroup" else None
