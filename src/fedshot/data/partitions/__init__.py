"""Partitions: which client holds which examples."""
