"""Benches of one way each to share a model among ranks."""
