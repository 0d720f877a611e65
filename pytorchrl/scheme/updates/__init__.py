"""Updates: the root of the worker tree, which applies gradients and keeps statistics."""
