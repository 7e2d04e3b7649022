"""Fleets run the clients' work one by one, in threads or vectorised; wrappers check replies."""
