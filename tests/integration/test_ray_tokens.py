"""The tests of token tasks in worker trees, with workers on Ray."""

from __future__ import annotations

import pytest

from tests.integration import test_tokens as tokens
from tests.integration.test_ray_patterns import PATTERNS
from tests.integration.test_tokens import make  # noqa: F401 - a fixture

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def ray(shared_ray):
    """Start Ray before anything counts threads."""
    return shared_ray


@pytest.mark.parametrize("mode", [tokens.WAIT, tokens.FINISH], ids=["wait", "finish"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.every(8)
def test_the_ledger_of_tokens_closes(make, pattern, mode):  # noqa: F811
    tokens.test_the_ledger_of_tokens_closes(make, pattern, "ray", mode)


@pytest.mark.parametrize("correction", ["ppo", pytest.param("decoupled", marks=pytest.mark.thorough)])
def test_without_lag_asynchronous_collection_is_synchronous(make, correction):  # noqa: F811
    tokens.test_without_lag_asynchronous_collection_is_synchronous(make, "ray", correction)


@pytest.mark.parametrize("mode", [tokens.FINISH, pytest.param(tokens.RECOMPUTE, marks=pytest.mark.thorough)],
                         ids=["finish", "recompute"])
def test_a_recorded_run_replays(make, tmp_path, mode):  # noqa: F811
    tokens.test_a_recorded_run_replays(make, tmp_path, "ray", mode)
