"""F2L: a shared server model and private client models, and what only it needs."""
