"""Checkpoint folders that load at any number of ranks.

A *folder* is where a checkpoint lies, a *part* what one rank holds of a tensor in it, an *outline* what it holds by
names and shapes. A *tree* is a nested dict of tensors, as a checkpoint has several.
"""
