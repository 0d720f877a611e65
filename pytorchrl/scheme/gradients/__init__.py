"""Provide batches to gradient workers, compute gradients from the batches, and average the workers' gradients."""
