"""Episodic tests with fixed episodes, scores, intervals and raw baselines."""
