"""Learners: how one model trains on the episodes or batches of one client."""
