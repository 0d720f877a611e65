"""Replacement of lost workers, evaluation in parallel with training, and reports of bad batches."""
