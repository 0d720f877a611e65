"""Recording of the order of events in a run, and its replay."""
