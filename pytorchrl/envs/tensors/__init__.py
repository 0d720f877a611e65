"""Environments written in torch: each steps all its copies at once with tensors, on any device."""
