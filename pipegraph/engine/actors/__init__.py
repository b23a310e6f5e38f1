"""Ray actors: run a stage's operator in processes of a Ray cluster. See ``actor_host`` for the contract."""
