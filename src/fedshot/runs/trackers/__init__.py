"""Trackers: TensorBoard, Weights & Biases and MLflow."""
