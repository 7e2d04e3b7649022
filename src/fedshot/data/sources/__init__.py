"""Sources of data: each has options, a way to load, and perhaps a standard class split."""
