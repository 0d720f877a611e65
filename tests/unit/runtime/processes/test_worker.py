"""Tests of the object that builds a worker and runs its methods, in the process of the test."""

from __future__ import annotations

import os
import socket
import sys

import cloudpickle
import torch

from pytorchrl.runtime.processes.worker import Start, _Host, _Reader


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


def test_the_largest_number_of_calls_is_recorded():
    listener, other = socket.socketpair()
    with listener, other:
        reader = _Reader(_Host(), listener)
        for number in (3, 2):
            for call in range(number):
                reader.calls.put(call)
            assert [reader.take() for _ in range(number)] == list(range(number))
    assert reader.peak == 3
