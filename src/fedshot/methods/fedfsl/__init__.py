"""The FedFSL family: MAML under federated averaging, and its regularizers."""
