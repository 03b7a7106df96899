"""Attention: which blocks of queries see which blocks of keys."""

from pyops.ops.attention.block_layout import BlockLayout

__all__ = ["BlockLayout"]
