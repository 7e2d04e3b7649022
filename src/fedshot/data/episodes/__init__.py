"""Episodes: their shape, and how they are sampled from a client's data."""
