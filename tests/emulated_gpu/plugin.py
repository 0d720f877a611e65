"""A plugin of pytest, for `pytest -p tests.emulated_gpu.plugin -m gpu`, with which tests run on an emulated GPU.

Without the option -p, nothing imports this module. pytest imports it before all other plugins, so before torch.
"""

from __future__ import annotations

import pytest

from tests.emulated_gpu.build import CannotEmulateError, MisfitError, build
from tests.emulated_gpu.activation import activate

FIRST_GPU = "cuda:0"
is_impossible = misfit = None
try:
    activate(build())
except CannotEmulateError as error:
    is_impossible = str(error)
except MisfitError as error:
    misfit = str(error)


def pytest_addoption(parser):
    parser.addoption("--gpu-by-default", action="store_true", help="let device=None mean the first GPU, for all tests")


def pytest_configure(config):
    if misfit is not None:
        raise pytest.UsageError(misfit)
    if config.getoption("dist", "no") != "no":
        raise pytest.UsageError("Tests on the emulated GPU run in one process: leave out the option -n.")
    if config.getoption("gpu_by_default") and is_impossible is None:
        use_gpu_by_default()


def use_gpu_by_default():
    """Let `device=None` mean the first GPU instead of the CPU in this process, for schemes and for single workers."""
    from pytorchrl.scheme.collection import c_worker, c_worker_set
    from pytorchrl.scheme.devices import check_device
    from pytorchrl.scheme.options import settings

    settings.CPU = FIRST_GPU
    c_worker.check_device = c_worker_set.check_device = lambda device, gpus=None, name="device": check_device(
        FIRST_GPU if device is None else device, gpus, name)


def pytest_report_header():
    return f"emulated GPU: {is_impossible or 'two, in host memory'}"


def pytest_collection_modifyitems(config, items):
    if config.getoption("gpu_by_default"):
        for item in items:
            if (marker := item.get_closest_marker("cpu")) is not None:
                item.add_marker(pytest.mark.skip(reason=f"not with a GPU: {marker.args[0]}"))
    if is_impossible is not None:
        for item in items:
            # "skipif", because these tests get such a marker, which would otherwise give the reason
            item.add_marker(pytest.mark.skipif(True, reason=is_impossible), append=False)
