"""Conformance checks: they test the guarantees that fedshot gives for every method."""

from fedshot.conformance.checks import CHECKS, CheckOutcome, Runs, check

__all__ = ["CHECKS", "CheckOutcome", "Runs", "check"]
