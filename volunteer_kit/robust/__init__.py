"""Reduction rules: many peers' parts of a tensor -> one. Pure tensors, no network."""
