"""Conformance checks: they test the guarantees that fedshot gives for every method."""
