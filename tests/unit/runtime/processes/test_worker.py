"""Tests of the object that builds a worker and runs its methods, in the process of the test."""

from __future__ import annotations

import os
import sys

import cloudpickle
import torch

from pytorchrl.runtime.processes.worker import Start, _Host


def start_of(cls, **params):
    return Start(pickled=cloudpickle.dumps((cls, params)), sys_path=list(sys.path), folder=os.getcwd(),
                 num_threads=torch.get_num_threads())


def test_signals_before_the_worker_is_built_run_once_it_is_built():
    host = _Host()
    assert host.signal("append", (1,), {}) is None
    assert host._worker is None or not host._early
    host.build(start_of(list))
    host.signal("append", (2,), {})
    assert host._worker is None or not host._early
    assert host.call("copy", (), {}) == [1, 2]
