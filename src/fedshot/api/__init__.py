"""The Python API of `import fedshot`: train, sweep, open and compare runs, list methods."""
