"""Channel -> workers -> channel, for one node of a running graph."""
