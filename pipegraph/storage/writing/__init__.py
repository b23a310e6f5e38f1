"""Writing shards: one shard at a time, or a whole dataset in parallel.

Mechanism only: what is written is the same whatever the workers and however often a run was stopped.
"""
