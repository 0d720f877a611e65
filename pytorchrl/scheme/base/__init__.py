"""What all levels of the worker tree share."""
