"""Attention: dense, of blocks, and its table and pictures."""
