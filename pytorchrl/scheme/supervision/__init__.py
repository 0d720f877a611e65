"""Replace lost workers, evaluate in parallel with training, and report batches whose loss or gradient is not finite."""
