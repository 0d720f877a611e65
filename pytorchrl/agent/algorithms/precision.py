"""Choose the precision in which networks compute."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from pytorchrl.agent.options import Options, option

AUTO = "auto"
"""Value of `mixed_precision` with which a scheme measures which precision is faster; see `precision_trial`."""


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(Options):
    """The option of all algorithms whose networks can compute in bfloat16."""

    mixed_precision: bool | str = option(
        False, choices=(False, True, AUTO),
        help="Run networks in bfloat16; parameters stay float32. With auto, the scheme measures once, when it starts, "
             "whether a gradient is faster in bfloat16; an algorithm without a scheme then computes in float32.")

    @property
    def is_mixed(self) -> bool:
        """Whether networks compute in bfloat16.

        If `mixed_precision` is "auto", the value is False until a scheme replaces "auto" with the faster choice.
        """
        return self.mixed_precision is True


def precision(device: torch.device, is_mixed: bool) -> AbstractContextManager[object]:
    """Return a context in which networks on `device` compute in bfloat16 if `is_mixed` is set, otherwise in float32.

    Even with `is_mixed`, only matrix products and convolutions are computed in bfloat16.
    """
    # Entering a disabled `torch.autocast` would take as long as the computation of a small layer.
    return torch.autocast(device.type, torch.bfloat16) if is_mixed else nullcontext()
