"""Optimizers' steps and the kernels below them."""
