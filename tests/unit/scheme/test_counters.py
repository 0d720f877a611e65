"""Check that counters of gradient workers are declared once and merged field by field."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from pytorchrl.scheme.counters import Merge, WorkerCounters


def test_every_counter_has_a_kind_and_a_meaning():
    for declared in fields(WorkerCounters):
        assert isinstance(declared.metadata["merge"], Merge)
        assert declared.metadata["help"].endswith(".")


def test_counters_are_merged_by_kind():
    merged = WorkerCounters.merge([
        WorkerCounters(rollouts=2, microbatch_steps=7, workers=1, agent_steps=Counter(a=3)),
        WorkerCounters(rollouts=3, microbatch_steps=5, workers=2, agent_steps=Counter(a=1, b=4))])
    assert merged == WorkerCounters(rollouts=5, microbatch_steps=7, workers=3, agent_steps=Counter(a=4, b=4))


def test_nothing_merged_is_zero():
    assert WorkerCounters.merge([]) == WorkerCounters()


@pytest.mark.parametrize("copy", [WorkerCounters.copy, lambda counted: WorkerCounters.merge([counted])])
def test_later_counts_do_not_change_a_copy(copy):
    counted = WorkerCounters(rollouts=1, agent_steps=Counter(a=1))
    sent = copy(counted)
    counted.rollouts += 1
    counted.agent_steps["a"] += 1
    assert sent == WorkerCounters(rollouts=1, agent_steps=Counter(a=1))


def test_a_copy_has_the_value_of_every_counter():
    counted = WorkerCounters(**{
        declared.name: Counter(a=place) if declared.name.endswith("_by_worker") or declared.name == "agent_steps"
        else place for place, declared in enumerate(fields(WorkerCounters), 1)})
    assert counted.copy() == counted


def test_a_counter_that_is_not_declared_is_an_error():
    with pytest.raises(AttributeError, match="rolouts"):
        WorkerCounters().rolouts += 1
