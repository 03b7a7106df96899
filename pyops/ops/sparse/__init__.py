"""What prunes: counts of magnitudes, masks made and applied, products of what is left."""

from pyops.ops.sparse import csr_product, nm_mask, radix_count, stripe_search

__all__ = ["csr_product", "nm_mask", "radix_count", "stripe_search"]
