"""The parts of an agent, in plain PyTorch and Gymnasium: they know no scheme and no runtime."""
