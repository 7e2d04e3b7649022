"""Datasets by name: their publishers, files, class splits, and loading."""
