"""The parts of an agent, in plain PyTorch and Gymnasium, independent of any scheme or runtime."""
