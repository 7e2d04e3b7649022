"""Runs on machines that are really apart."""
