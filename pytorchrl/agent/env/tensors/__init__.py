"""Use environments that step all copies at once with tensors of torch, or with arrays of other libraries."""
