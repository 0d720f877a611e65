"""Drive a scheme until a target: measure, record, evaluate, save checkpoints, handle signals."""
