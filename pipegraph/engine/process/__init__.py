"""Worker processes: run a stage's operator in other processes. See ``contract`` for the interface."""
