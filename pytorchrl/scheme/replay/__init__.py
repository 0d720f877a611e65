"""The replay level of the worker tree: shards between collection and gradients."""
