"""Gradient workers, the sources of their batches, and the averaging of gradients among the workers."""
