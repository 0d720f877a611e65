"""Devices, streams and events of the emulated GPU.

Work is done when it is launched, so nothing has to wait for it, except while `order.h` checks that the program waits.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import types

import torch

NAME = "emulated GPU"

_numbers = itertools.count()
_of_thread = threading.local()
_defaults = []  # the default stream of each device
_HOST = -1  # stands for the host, where a stream may wait, too
loaded = []  # the library, if this process has an emulated GPU


def replace(devices):
    """Replace the functions of `torch.cuda`, with those of the library."""
    exchange, count = devices.emulated_gpu_exchange, devices.emulated_gpu_count()
    _declare(devices)
    loaded.append(devices)
    replaced = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: count, "current_device": lambda: exchange(-1),
        "set_device": lambda device: exchange(_index_of(device)) and None,
        "_exchange_device": exchange, "_maybe_exchange_device": exchange,
        "synchronize": lambda device=None: devices.emulated_gpu_wait_for_all(),
        "empty_cache": lambda: None, "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_properties": _properties_of, "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0), "Event": Event, "Stream": Stream,
        "set_stream": set_stream, "current_stream": lambda device=None: _streams()[_index_of(device)],
        "default_stream": lambda device=None: _defaults[_index_of(device)],
    }
    for name, replacement in replaced.items():
        if not hasattr(torch.cuda, name):
            raise AttributeError(f"torch.cuda.{name}, which the emulated GPU replaces, does not exist")
        setattr(torch.cuda, name, replacement)
    torch.backends.cuda.is_built = lambda: True
    torch.cuda.default_generators = tuple(torch.Generator(device=f"cuda:{index}") for index in range(count))
    torch.Tensor.record_stream = lambda tensor, stream: devices.emulated_gpu_record_use(
        tensor.untyped_storage().data_ptr(), stream.stream_id)
    torch.UntypedStorage.clone = _copy_of_storage
    _defaults.extend(Stream(index) for index in range(count))


def _declare(devices):
    number = ctypes.c_int64
    devices.emulated_gpu_set_stream.argtypes = [ctypes.c_int, number]
    devices.emulated_gpu_wait.argtypes = [number] * 3
    devices.emulated_gpu_record_use.argtypes = [ctypes.c_void_p, number]
    devices.emulated_gpu_now.restype = devices.emulated_gpu_num_late.restype = number
    devices.emulated_gpu_check_order.restype = ctypes.c_char_p


class Event:
    """An event of a stream, which has happened when the operations before it have been done."""

    def __init__(self, **options):
        self._after = None  # the stream, and the number of its last operation before the event

    def record(self, stream=None):
        self._after = (stream or torch.cuda.current_stream()).stream_id, loaded[0].emulated_gpu_now()

    def wait(self, stream=None):
        self._let_wait((stream or torch.cuda.current_stream()).stream_id)

    def synchronize(self):
        self._let_wait(_HOST)

    def query(self):
        self.synchronize()
        return True

    def _let_wait(self, waiting):
        if self._after is not None:
            loaded[0].emulated_gpu_wait(waiting, *self._after)


class Stream:
    """A stream, which is only a number."""

    def __init__(self, device=None, priority=0):
        self.device, self.stream_id = torch.device("cuda", _index_of(device)), next(_numbers)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def wait_event(self, event):
        event.wait(self)

    def synchronize(self):
        self.record_event().synchronize()

    def query(self):
        return self.record_event().query()

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event


def set_stream(stream):
    """Make a stream the current one of its device in this thread."""
    _streams()[stream.device.index] = stream
    loaded[0].emulated_gpu_set_stream(stream.device.index, stream.stream_id)


def _streams():
    """Return the current stream of each device in this thread."""
    if not hasattr(_of_thread, "streams"):
        _of_thread.streams = list(_defaults)
    return _of_thread.streams


def _index_of(device):
    return torch.cuda._utils._get_device_index(device, optional=True)


def _properties_of(device=None):
    return types.SimpleNamespace(
        name=NAME, uuid=f"GPU-{_index_of(device)}", major=9, minor=0, total_memory=2**33, multi_processor_count=1)


_clone = torch.UntypedStorage.clone


def _copy_of_storage(storage):
    """Copy a storage, for `copy.deepcopy` of a tensor; only builds for CUDA can make an empty storage of a GPU."""
    if storage.device.type != "cuda":
        return _clone(storage)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()
