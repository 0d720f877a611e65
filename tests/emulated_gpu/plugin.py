"""A plugin of pytest, for `pytest -p tests.emulated_gpu.plugin -m gpu`, with which tests run on an emulated GPU.

Without the option -p, nothing imports this module. pytest imports it before all other plugins, so before torch.
"""

from __future__ import annotations

import pytest

from tests.emulated_gpu.build import CannotEmulateError, MisfitError, build
from tests.emulated_gpu.activation import activate

is_impossible = misfit = None
try:
    activate(build())
except CannotEmulateError as error:
    is_impossible = str(error)
except MisfitError as error:
    misfit = str(error)


def pytest_configure(config):
    if misfit is not None:
        raise pytest.UsageError(misfit)
    if config.getoption("dist", "no") != "no":
        raise pytest.UsageError("Tests on the emulated GPU run in one process: leave out the option -n.")


def pytest_report_header():
    return f"emulated GPU: {is_impossible or 'two, in host memory'}"


def pytest_collection_modifyitems(items):
    if is_impossible is not None:
        for item in items:
            # "skipif", because the tests have such a marker, which would otherwise give the reason
            item.add_marker(pytest.mark.skipif(True, reason=is_impossible), append=False)
