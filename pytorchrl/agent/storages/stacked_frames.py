"""Detect observations that are stacks of the newest frames. T = steps, E = environments."""

from __future__ import annotations

import numpy as np

from pytorchrl.errors import ConfigError


def num_stacked_frames(leaf: np.ndarray, done: np.ndarray, wanted: int | None) -> int:
    """Return the number of frames stacked in each observation; 1 if observations are to be stored unchanged.

    Args:
        leaf: One leaf of the observations of a rollout, (T + 1, E, ...).
        done: (T + 1, E) bool, whether an observation is the first of its episode.
        wanted: Number of frames; None detects stacks of uint8 images, which shift by one frame per step.

    Raises:
        ConfigError: The observations are not stacks of `wanted` frames.
    """
    if leaf.ndim != 5 or wanted == 1:
        return 1
    num_frames, channels = wanted or leaf.shape[2], leaf.shape[2]
    if channels % num_frames:
        raise ConfigError(f"stacked_frames must divide the {channels} channels of images, got {num_frames}")
    if wanted is None and (leaf.dtype != np.uint8 or num_frames < 2):
        return 1
    size = channels // num_frames
    goes_on = ~done[1:]
    moved_on = (leaf[1:, :, :-size] == leaf[:-1, :, size:]).all(axis=(2, 3, 4))
    if wanted is None:
        return num_frames if goes_on.any() and moved_on[goes_on].mean() > 0.5 else 1
    if goes_on.any() and not moved_on[goes_on].any():
        raise ConfigError(f"stacked_frames={wanted}, but stacks do not shift by one frame per step; "
                          "leave stacked_frames out")
    return num_frames
