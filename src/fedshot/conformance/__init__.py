"""What fedshot promises of every method, as checks that run on any of them."""

from fedshot.conformance.checks import CHECKS, CheckOutcome, Runs, check

__all__ = ["CHECKS", "CheckOutcome", "Runs", "check"]
