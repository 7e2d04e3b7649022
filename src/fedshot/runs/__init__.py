"""A run: prepared, trained round by round, recorded, checkpointed, and resumed."""
