"""Writing shards; what is written is the same however often a run was stopped."""
