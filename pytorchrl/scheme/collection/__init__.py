"""Collection workers, which act in environments, and the threads and strategies that collect their rollouts."""
