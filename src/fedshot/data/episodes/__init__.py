"""Episodes: their shape, and how they are sampled from what a client holds."""
