"""Kernels of sparse weights: N:M masks, counts of magnitudes and bits that say what stays."""
