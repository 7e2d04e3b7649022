"""Secure sums and differential privacy."""
