"""Federated few-shot learning: train across clients, recognise new classes from a few examples."""

__version__ = "0.1.0"
