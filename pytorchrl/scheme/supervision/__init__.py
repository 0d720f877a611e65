"""Replacement of lost workers, evaluation beside training, and records of bad batches."""
