"""Parts of the Ray runtime that need no Ray."""

from __future__ import annotations

import signal
from types import SimpleNamespace

from pytorchrl.runtime.ray_runtime import _without_handlers_of


def test_ray_puts_in_no_handler_of_sigterm_while_it_starts():
    """Its own would end the process with 15, with 1, or with a crash in native code."""
    found = signal.getsignal(signal.SIGTERM)
    utils = SimpleNamespace(set_sigterm_handler=lambda handler: signal.signal(signal.SIGTERM, handler))
    theirs = utils.set_sigterm_handler
    with _without_handlers_of(SimpleNamespace(_private=SimpleNamespace(utils=utils))):
        utils.set_sigterm_handler(signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == found
    assert utils.set_sigterm_handler is theirs
