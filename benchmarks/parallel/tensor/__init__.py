"""Tensor parallelism, of layers written for it and of models converted to it."""
