"""Partitions: the assignment of a dataset's examples to clients."""
