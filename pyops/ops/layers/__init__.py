"""Differentiable operations of a layer: contracts, gradients and plain-torch references."""
