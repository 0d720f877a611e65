"""Tests of the enums of options."""

from __future__ import annotations

import pytest

from pytorchrl.errors import ConfigError
from pytorchrl.scheme.options.base import ASYNC, CENTRAL, PARALLEL, SYNC, Execution, check_execution


@pytest.mark.parametrize("choice", [SYNC, ASYNC, CENTRAL, PARALLEL])
def test_a_choice_equals_its_text(choice):
    assert type(choice)(str(choice)) is choice
    assert choice == str(choice)


@pytest.mark.parametrize(("text", "near"), [("central", "Central"), ("Parallels", "Parallel")])
def test_a_wrong_choice_is_refused_with_a_suggestion(text, near):
    with pytest.raises(ConfigError, match=rf"execution must be one of .*, got '{text}'; did you mean '{near}'\?"):
        Execution(text)


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("execution", ["Central", PARALLEL])
def test_only_one_worker_can_be_central(execution, num_workers):
    if execution == "Central" and num_workers > 1:
        with pytest.raises(ConfigError, match=f"grad_execution='Central' contradicts num_grad_workers={num_workers}"):
            check_execution("grad", execution, num_workers)
    else:
        assert check_execution("grad", execution, num_workers) is Execution(execution)
