"""Baselines: prototypes, MAML and classification under federated averaging, and local training."""
