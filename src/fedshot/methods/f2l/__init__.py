"""The F2L method, which trains a shared server-model and private client-models, and its losses."""
