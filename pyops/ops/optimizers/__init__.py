"""Optimizer steps over a list of tensors in one launch: contracts and plain-torch references."""
