"""Devices, streams and events of the emulated GPU. Work is done when it is launched, so nothing waits for a stream."""

from __future__ import annotations

import itertools
import threading
import types

import torch

NAME = "emulated GPU"

_numbers = itertools.count()
_of_thread = threading.local()
_defaults = []  # the default stream of each device


def replace(exchange, count):
    """Replace the functions of `torch.cuda`; `exchange` sets the current device, and returns the one before."""
    replaced = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: count, "current_device": lambda: exchange(-1),
        "set_device": lambda device: exchange(_index_of(device)) and None,
        "_exchange_device": exchange, "_maybe_exchange_device": exchange, "synchronize": lambda device=None: None,
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
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.UntypedStorage.clone = _copy_of_storage
    _defaults.extend(Stream(index) for index in range(count))


class Event:
    """An event that has happened."""

    def __init__(self, **options):
        pass

    def record(self, stream=None):
        pass

    synchronize = wait = record

    def query(self):
        return True


class Stream:
    """A stream on which all work is done."""

    def __init__(self, device=None, priority=0):
        self.device, self.stream_id = torch.device("cuda", _index_of(device)), next(_numbers)

    def wait_stream(self, stream):
        pass

    wait_event = wait_stream

    def synchronize(self):
        pass

    def query(self):
        return True

    def record_event(self, event=None):
        return event or Event()


def set_stream(stream):
    """Make a stream the current one of its device in this thread."""
    _streams()[stream.device.index] = stream


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
