"""One configuration: its sections, the registry of kinds, reading and checking, and option help."""
