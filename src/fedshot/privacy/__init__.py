"""Privacy: what the server and other clients can learn from what a client sends."""
