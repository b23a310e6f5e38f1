"""Worker processes: a stage whose operator lives in other processes. See ``host`` for the contract."""
