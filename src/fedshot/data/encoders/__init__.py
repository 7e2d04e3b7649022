"""Frozen encoders, which turn images or texts into features once, before training."""
