"""Apply gradients and keep statistics in the update worker, the root of the worker tree."""
