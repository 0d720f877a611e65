"""Compare random schedules with the account of a `Witness`, and check that the witness finds planted bugs."""

from __future__ import annotations

import pytest

from tests.unit.scheme.planted_bugs import BUGS
from tests.unit.scheme.witness import WitnessError
from tests.unit.scheme.witnessed_runs import COINCIDENCES, explore, run

NUM_SCHEDULES = 1000


def show(capsys, *lines):
    """Write lines to the terminal, although pytest captures the output of tests."""
    with capsys.disabled():
        print("", *lines, sep="\n")  # noqa: T201 - the counts are the result of a thorough test


def seed_of(error):
    return int(str(error).split(":")[0].removeprefix("seed "))


def test_both_accounts_agree():
    digests, _ = explore(range(24))
    assert len(digests) > 18


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_both_accounts_agree_in_a_thousand_schedules_with_many_coincidences(capsys):
    digests, coincidences = explore(range(NUM_SCHEDULES))
    show(capsys, *(f"{coincidences[what]:4} of {NUM_SCHEDULES}: {what}" for what in COINCIDENCES))
    assert len(digests) > 0.9 * NUM_SCHEDULES
    assert min(coincidences[what] for what in COINCIDENCES) >= 20


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found_from_a_stored_seed(monkeypatch, bug):
    first, says = BUGS[bug]
    with monkeypatch.context() as planted:
        bug(planted)
        with pytest.raises(WitnessError, match=says) as caught:
            explore(range(first, first + 10))
    run(seed_of(caught.value))  # without the bug, the same schedule passes


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found_in_a_thousand_schedules(monkeypatch, capsys, bug):
    bug(monkeypatch)
    with pytest.raises(WitnessError, match=BUGS[bug][1]) as caught:
        explore(range(NUM_SCHEDULES))
    show(capsys, f"{seed_of(caught.value) + 1:4} schedules: {bug.__name__}")
