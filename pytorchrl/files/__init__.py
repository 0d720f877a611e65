"""Write and read files safely: at once, line by line, tensors with a checksum, and the directory of a run."""
