"""Recognize spaces of images.

Worker processes of `backend="async"` import this module, so it must not import torch.
"""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from pytorchrl.agent.env.aliases import AnySpace

_NUM_CHANNELS = (1, 3, 4)
MIN_IMAGE_SIZE = 16
"""Smallest height and width, in pixels, of an observation that is treated as an image by default."""


def has_image_values(space: spaces.Box) -> bool:
    """Return whether the values may be pixels: unsigned bytes, or floats whose bounds are 0 and 1 everywhere."""
    return space.dtype == np.uint8 or (
        np.issubdtype(space.dtype, np.floating) and not np.any(space.low) and bool(np.all(space.high == 1)))


def has_channels_last(space: AnySpace) -> bool:
    """Return whether the observations are images (H, W, C); `flatten_space` states the conditions."""
    return (
        isinstance(space, spaces.Box) and len(space.shape) == 3
        and space.shape[2] in _NUM_CHANNELS and space.shape[0] not in _NUM_CHANNELS
        and (space.dtype == np.uint8 or min(space.shape[:2]) >= MIN_IMAGE_SIZE) and has_image_values(space)
    )


def channels_first(space: spaces.Box) -> spaces.Box:
    """Return the space of images (C, H, W) for a space of images (H, W, C)."""
    return spaces.Box(np.moveaxis(space.low, -1, 0), np.moveaxis(space.high, -1, 0), dtype=space.dtype.type)
