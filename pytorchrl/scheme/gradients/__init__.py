"""Gradient workers: sample queue, batches, gradients, and averaging among the workers."""
