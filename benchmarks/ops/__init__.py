"""Benches of single kernels and ops, on one device."""
