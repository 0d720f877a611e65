"""Gradient workers: queues of samples, batches, gradients, and the averaging of gradients among the workers."""
