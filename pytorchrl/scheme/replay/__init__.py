"""The replay level of the worker tree: shards that store collected data, and sample batches for gradient workers."""
