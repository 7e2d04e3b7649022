"""Conformance checks, which test what fedshot guarantees for every method."""

from fedshot.conformance.checks import CHECKS, CheckOutcome, Runs, check

__all__ = ["CHECKS", "CheckOutcome", "Runs", "check"]
