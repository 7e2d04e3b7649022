"""Data sources: each loads one dataset or file format, with options, and may define a split."""
