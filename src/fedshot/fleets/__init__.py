"""Fleets run clients one by one, in threads or processes, or vectorised; wrappers check replies."""
