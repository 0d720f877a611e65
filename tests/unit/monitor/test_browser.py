"""Tests of the scripts of pages in Chromium, if it is installed: every chart is drawn, and the console stays empty."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading

import pytest

from pytorchrl.monitor.board import Board
from pytorchrl.monitor.page import write_report
from pytorchrl.monitor.view import read_run
from tests.unit.monitor.runs import hostile_run, make_run, usual_records

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]


def browse(address, profile):
    """Return the page as it is after its scripts have run, and the messages of its console."""
    result = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}", "--enable-logging=stderr",
         "--virtual-time-budget=3000", "--dump-dom", address],
        capture_output=True, text=True, timeout=150, check=True)
    return result.stdout, re.findall(r"CONSOLE.*", result.stderr)


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"]])
def test_every_visible_chart_of_a_report_is_drawn(tmp_path, names):
    runs = [make_run(tmp_path / name, usual_records()) for name in names] + [hostile_run(tmp_path / "hostile")]
    write_report([read_run(run) for run in runs[len(names) == 1:]], tmp_path / "page.html")
    page, messages = browse((tmp_path / "page.html").as_uri(), tmp_path / "profile")
    assert messages == []
    charts = page[page.index("<h2>Curves"):page.index("statistics of the algorithm")].count(" data-chart=")
    assert page.count('class="u-over"') == charts > 0
    assert "<img" not in page


def test_the_rows_of_the_board_appear(tmp_path):
    make_run(tmp_path / "runs" / "a", usual_records())
    hostile_run(tmp_path / "runs" / "hostile")
    with Board(tmp_path / "runs") as board:
        thread = threading.Thread(target=board.serve_forever, args=(0.01,))
        thread.start()
        try:
            page, messages = browse(f"http://127.0.0.1:{board.server_port}/", tmp_path / "profile")
        finally:
            board.shutdown()
            thread.join()
    assert messages == []
    assert page.count('type="checkbox"') == 2
    assert "2 runs</span>" in page
    assert "<img" not in page
