"""Choose the precision in which networks compute."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

MIXED_PRECISION_HELP = "Run networks in bfloat16; parameters stay float32."
"""Help text of the option `mixed_precision`."""


def precision(device: torch.device, is_mixed: bool) -> AbstractContextManager[object]:
    """Return a context in which networks on `device` compute in bfloat16 if `is_mixed` is set, and otherwise as usual.

    Only the products of matrices and convolutions are computed in bfloat16.
    """
    # Without mixed precision, return no `torch.autocast`: even a disabled one takes as long as a small layer.
    return torch.autocast(device.type, torch.bfloat16) if is_mixed else nullcontext()
