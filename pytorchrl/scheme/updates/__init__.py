"""The root of the worker tree, which applies gradients and keeps statistics."""
