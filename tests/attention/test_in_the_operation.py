"""The six patterns in the operation: y, lse and all gradients as explicit scores give them, where
what is seen comes from the rules stated as sets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyops.attention import BigBird, Dense, Fixed, Longformer, Pattern, SlidingWindow, Variable
from pyops.ops.attention import AttentionBias, AttentionMask, attention_with_lse
from tests.attention.block_sets import blocks_of
from tests.ops.attention.cases import explicit

pytestmark = pytest.mark.cpu_only  # of CUDA: tests/ops/triton/interpret_attention.py

SIX: tuple[Pattern, ...] = (
    Dense(),
    Fixed(3, 1, num_different_global_patterns=3),
    Variable(num_random_blocks=1, local_window_blocks=(1, 2), different_layout_per_head=True),
    BigBird(num_random_blocks=1, different_layout_per_head=True, seed=4),
    Longformer(num_sliding_window_blocks=3, global_block_indices=(1,)),
    SlidingWindow(3),
)
TOKENS, BLOCK, HEADS = 170, 16, 4  # the last block has fewer tokens


def seen_by_rule(pattern: Pattern, *, causal: bool) -> Tensor:
    """bool [H, T, T], token by token."""
    n = -(-TOKENS // BLOCK)
    seen = torch.zeros(HEADS, n * BLOCK, n * BLOCK, dtype=torch.bool)
    for head in range(HEADS):
        for row, column in blocks_of(pattern, head, n, causal=causal):
            seen[head, row * BLOCK :, column * BLOCK :][:BLOCK, :BLOCK] = True
    seen = seen[:, :TOKENS, :TOKENS]
    return seen.tril() if causal else seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", SIX, ids=lambda pattern: type(pattern).__name__)
def test_a_pattern_is_its_rule(pattern: Pattern, causal: bool):
    generator = torch.Generator().manual_seed(TOKENS)
    q, k, v, dy = (
        torch.randn(2, TOKENS, heads, 8, generator=generator, dtype=torch.float64)
        for heads in (HEADS, 2, 2, HEADS)
    )
    seen = seen_by_rule(pattern, causal=causal)
    assert not causal or not bool(seen.triu(1).any())
    hidden = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    layout = pattern.layout(TOKENS, heads=HEADS, block=BLOCK, causal=causal)
    found = []
    for call, more in (
        (attention_with_lse, {"mask": AttentionMask(layout=layout)}),
        (explicit, {"mask": AttentionMask(), "bias": AttentionBias(scores=hidden)}),
    ):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        y, lse = call(*leaves, scale=0.4, **more)
        grads = torch.autograd.grad((y * dy).sum() + lse.cos().sum(), leaves)
        found.append([y.detach(), lse.detach(), *grads])
    for ours, theirs in zip(*found, strict=True):
        assert bool(theirs.any())
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
