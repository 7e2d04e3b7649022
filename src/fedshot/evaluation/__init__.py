"""Episodic tests with fixed episodes, scores and intervals."""
