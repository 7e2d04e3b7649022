"""Fleets run the clients' work in sequence, in threads or vectorised; wrappers check replies."""
