"""Tests of the files from which pages are made: those of uPlot are unchanged, and the policy allows one script."""

from __future__ import annotations

import hashlib
from importlib import resources

import pytest

from pytorchrl.monitor.style import asset, board_script, policy, report_script, style

# The digests of the files of uPlot 1.6.32.
UPLOT = {
    "uPlot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


@pytest.mark.parametrize("name", UPLOT)
def test_the_files_of_uplot_are_unchanged(name):
    content = (resources.files("pytorchrl.monitor") / "assets" / "uplot" / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == UPLOT[name]


def test_the_version_and_the_licence_of_uplot_stand_beside_it():
    assert "(v1.6.32)" in asset("uplot/uPlot.js")
    assert asset("uplot/README.md").startswith("# uPlot 1.6.32\n")
    assert asset("uplot/LICENSE").startswith("The MIT License (MIT)")


@pytest.mark.parametrize("text", [board_script(), report_script(), style(charts=True)])
def test_scripts_and_styles_fit_into_a_page_and_load_nothing(text):
    assert "</" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert "XMLHttpRequest" not in text
    assert "fetch(" not in text.replace('fetch("/rows")', "")


def test_the_policy_allows_one_script():
    assert "script-src 'sha256-" in policy(board_script())
    assert policy(board_script()) != policy(report_script())
