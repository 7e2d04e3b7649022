"""Models: backbones, and the layers that they consist of."""
