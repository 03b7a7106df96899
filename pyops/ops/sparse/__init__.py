"""What prunes: counts of magnitudes, and masks applied."""

from pyops.ops.sparse import csr_product, nm_mask, stripe_search

__all__ = ["csr_product", "nm_mask", "stripe_search"]
