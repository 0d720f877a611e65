"""Small helpers that every part of the package may use: logging, tracebacks, threads, signals, names of types."""
