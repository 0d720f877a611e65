"""Find where the time of a run goes: for each kind of work, and for each thread and worker."""
