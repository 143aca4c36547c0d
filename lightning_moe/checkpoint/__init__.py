"""Checkpoint folders that load at any number of ranks."""
