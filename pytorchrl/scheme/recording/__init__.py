"""Recording of the order of events in a run, and replay of the run."""
