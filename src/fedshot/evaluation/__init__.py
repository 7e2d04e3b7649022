"""Episodic tests with fixed episodes, scores, intervals, and baselines on the raw inputs."""
