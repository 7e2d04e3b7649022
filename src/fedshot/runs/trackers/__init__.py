"""Records sent on to TensorBoard, Weights & Biases or MLflow."""
