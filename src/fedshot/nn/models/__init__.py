"""Backbones and the layers they are made of."""
