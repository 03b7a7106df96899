"""Context parallelism: ranks hold other tokens of the same rows, and attention sees all of them.

ranks = ContextRanks.of(mesh, method="ring")
row = ContextRow(ranks, Order.of("zigzag", length=T, ranks=ranks.size))
x = row.shard(tokens)                            # and targets, positions, rows of rotary tables
y = row.attention(q, k, v, mask=AttentionMask(causal=True))
loss = token_mean(sum_of_losses, count, group=mesh.group(("dp", "cp")))
"""

from pyops.context_parallel.attention import METHODS, ContextRanks, ContextRow
from pyops.context_parallel.cost import AttentionShape, ContextCost, context_cost
from pyops.context_parallel.loss import token_mean
from pyops.context_parallel.order import ORDERS, Order, pad_tokens

__all__ = [
    "METHODS",
    "ORDERS",
    "AttentionShape",
    "ContextCost",
    "ContextRanks",
    "ContextRow",
    "Order",
    "context_cost",
    "pad_tokens",
    "token_mean",
]
