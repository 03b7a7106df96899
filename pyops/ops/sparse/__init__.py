"""What prunes: counts of magnitudes, and masks applied."""

from pyops.ops.sparse import radix_count

__all__ = ["radix_count"]
