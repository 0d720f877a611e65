"""Code that all levels of the worker tree share."""
