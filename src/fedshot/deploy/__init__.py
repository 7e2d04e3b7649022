"""Training across machines."""
