"""Ray actors: a stage whose operator lives in processes of a Ray cluster. See ``actor_host`` for the contract."""
