"""Runs on Flower, with real processes on loopback."""
