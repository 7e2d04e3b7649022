"""Fleets run the work of clients in sequence, in threads or vectorised; wrappers add to them."""
