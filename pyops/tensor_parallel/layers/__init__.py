"""Tensor-parallel modules: linear layers, attention, MLP, embedding, norms."""
