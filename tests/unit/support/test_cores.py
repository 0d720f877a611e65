"""Test the number of CPU cores that a process may use."""

from __future__ import annotations

import os

import pytest

from pytorchrl.support.cores import usable_cores


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes cannot be bound to cores")
def test_cores_are_those_of_the_affinity_and_of_the_container(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    files = {"v2": "250000 100000", "none": "max 100000", "quota": "150000", "unlimited": "-1", "period": "100000",
             "small": "1000 100000"}
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")

    def cores(*names):
        return usable_cores([[str(tmp_path / name) for name in names]])

    assert usable_cores([]) == cores("absent") == cores("none") == cores("unlimited", "period") == 8
    assert (cores("v2"), cores("quota", "period"), cores("small")) == (3, 2, 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert usable_cores([]) == cores("v2") == 1
