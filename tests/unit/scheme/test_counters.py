"""Counters of gradient workers are declared once and merged by field."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from pytorchrl.scheme.counters import Kind, WorkerCounters


def test_every_counter_has_a_kind_and_a_meaning():
    for declared in fields(WorkerCounters):
        assert isinstance(declared.metadata["kind"], Kind)
        assert declared.metadata["help"].endswith(".")


def test_counters_are_merged_by_kind():
    merged = WorkerCounters.merge([
        WorkerCounters(rollouts=2, microbatch_steps=7, workers=1, agent_steps=Counter(a=3)),
        WorkerCounters(rollouts=3, microbatch_steps=5, workers=2, agent_steps=Counter(a=1, b=4))])
    assert merged == WorkerCounters(rollouts=5, microbatch_steps=7, workers=3, agent_steps=Counter(a=4, b=4))


def test_nothing_merged_is_zero():
    assert WorkerCounters.merge([]) == WorkerCounters()


def test_counters_that_a_worker_sent_are_read_by_name():
    counters = WorkerCounters.of({
        "rollouts": 2, "preempted": 1, "preempted/3": 1, "agent_steps/left/hand": 4, "agent_steps/right": 5})
    assert (counters.rollouts, counters.preempted) == (2, 1)
    assert counters.preempted_by_worker == {3: 1}
    assert counters.agent_steps == {"left/hand": 4, "right": 5}


def test_a_counter_that_is_not_declared_is_an_error():
    with pytest.raises(TypeError, match="rolouts"):
        WorkerCounters.of({"rolouts": 1})
