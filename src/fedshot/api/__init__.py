"""The Python API that `import fedshot` offers: train, open runs, compare, list what exists."""
