"""What fedshot promises of every method, as checks that run on any of them."""

from fedshot.conformance.checks import CHECKS, Outcome, Runs, check

__all__ = ["CHECKS", "Outcome", "Runs", "check"]
