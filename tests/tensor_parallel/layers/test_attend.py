"""attend over the fused operation, against explicit scores in float64: whatever a query sees, what
is added, and what is dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.attention import BigBird, Fixed, Longformer, PatternLayouts, SlidingWindow, Variable
from pyops.ops.layers.dropout import dropout_state
from pyops.tensor_parallel import RelativeBias, RelativeBiasConfig
from pyops.tensor_parallel.functional.scores import (
    DistanceBias,
    ScoreDropout,
    Seen,
    attend,
)
from tests.tensor_parallel.layers.explicit_scores import attend_by_scores

pytestmark = pytest.mark.on_device

B, T, H, G, K = 2, 37, 4, 2, 8


def layout_of(device: torch.device, *, causal: bool) -> Any:
    """Each head has its own block, and one at random."""
    pattern = BigBird(1, 1, num_global_blocks=0, different_layout_per_head=True)
    layout = PatternLayouts(pattern, heads=H, block=16, causal=causal).of(T, device)
    assert layout.tokens().unique(dim=0).shape[0] > 1
    return layout


def key_mask(device: torch.device) -> Tensor:
    """Padding at the end of the second row, and a first row of which some queries see nothing."""
    mask = torch.ones(B, T, dtype=torch.bool, device=device)
    mask[1, -5:] = False
    mask[0, :3] = False
    return mask


def pair_mask(device: torch.device) -> Tensor:
    mask = torch.rand(B, T, T, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[0, 4] = False
    return mask.to(device)


def documents(device: torch.device) -> Tensor:
    ids = torch.tensor([[0] * 10 + [1] * 20 + [-1] * 7, [3] * 37], dtype=torch.int32)
    return ids.to(device)


def table(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randn(8, H, generator=generator, dtype=torch.float64)
    return drawn.to(device).requires_grad_()


def full_bias(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(1, H, T, T, generator=generator, dtype=torch.float64)
    return drawn.to(device).requires_grad_()


SEEN: dict[str, Callable[[torch.device], Seen]] = {
    "all": lambda device: Seen(),
    "causal": lambda device: Seen(causal=True),
    "keys": lambda device: Seen(mask=key_mask(device)),
    "keys, causal": lambda device: Seen(causal=True, mask=key_mask(device)),
    "pairs": lambda device: Seen(mask=pair_mask(device)),
    "documents": lambda device: Seen(causal=True, documents=documents(device)),
    "pattern": lambda device: Seen(causal=True, layout=layout_of(device, causal=True)),
    "pattern, keys": lambda device: Seen(
        mask=key_mask(device), layout=layout_of(device, causal=False)
    ),
    "pattern, documents": lambda device: Seen(
        causal=True, documents=documents(device), layout=layout_of(device, causal=True)
    ),
}
BIASES: dict[str, Callable[[torch.device], Any]] = {
    "none": lambda device: None,
    "tensor": full_bias,
    "table": lambda device: DistanceBias(table(device), 12, False),
    "table and slopes": lambda device: DistanceBias(
        table(device), 12, True, torch.linspace(0.1, 0.4, H, dtype=torch.float64, device=device)
    ),
}


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("seen", SEEN)
def test_the_same_as_explicit_scores(seen: str, bias: str, dropped: bool, device: torch.device):
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        x = torch.randn(B, T, heads, K, generator=generator, dtype=torch.float64)
        return x.to(device).requires_grad_()

    q, k, v, dy = drawn(H), drawn(G), drawn(G), drawn(H).detach().flatten(2)
    added = BIASES[bias](device)
    inputs = [q, k, v]
    if isinstance(added, Tensor):
        inputs.append(added)
    elif added is not None:
        inputs.append(added.table)
    # A rank's heads 2 to 5 of 6, in row 3 of the batch.
    state = dropout_state(77, (3 * 6 + 2) * T * T, device=device)
    dropout = ScoreDropout(0.3, state, 6 * T * T) if dropped else None
    results = []
    for function in (attend, attend_by_scores):
        y = function(q, k, v, scale=0.4, seen=SEEN[seen](device), bias=added, dropout=dropout)
        results.append([y.detach(), *torch.autograd.grad(y, inputs, dy)])
    for name, found, wanted in zip(["y", "dq", "dk", "dv", "dbias"], *results, strict=False):
        assert wanted.abs().max() > 1e-3, f"{name} is zero, so this shows nothing"
        torch.testing.assert_close(
            found, wanted, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_relative_bias_is_its_scores(bidirectional: bool, device: torch.device):
    config = RelativeBiasConfig(num_buckets=8, max_distance=9, bidirectional=bidirectional, std=1.0)
    layer = RelativeBias(H, config, device=device, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(B, T, H, K, generator=generator, dtype=torch.float64).to(device)
        for _ in range(3)
    )
    found = attend(q, k, v, scale=0.4, bias=layer())
    wanted = attend(q, k, v, scale=0.4, bias=layer.scores(T, T))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    (gradient,) = torch.autograd.grad(found.square().sum(), layer.weight)
    used = layer.scores(T, T).unique().numel() // H
    assert int((gradient != 0).all(1).sum()) == used >= 7
    with pytest.raises(TypeError, match=r"`scores\(queries, keys\)` for the tensor"):
        layer(T, T)


@pytest.mark.cpu_only
def test_layouts_of_a_pattern():
    """Heads of a rank are those of the whole; shorter sequences begin as the longest does, however
    the pattern counts; a query that follows has its row."""
    pattern = BigBird(num_random_blocks=3, different_layout_per_head=True)
    pattern |= Longformer(global_block_indices=(0, 6))
    for rule in (
        pattern,
        Fixed(4, 2, num_different_global_patterns=2),
        Variable(2, (2, 3), (1, 7)),
    ):
        whole = PatternLayouts(rule, heads=6, block=16, causal=True)
        longest = rule.layout(192, heads=6, block=16, causal=True).tokens()
        seen = longest.expand(6, -1, -1)
        part = dataclasses.replace(whole, heads=2, first_head=3)
        for length in (1, 16, 37, 144, 192):
            found = whole.of(length).tokens()
            assert torch.equal(found, longest[:, :length, :length]), rule
            own = seen[3:5, :length, :length]
            assert torch.equal(part.of(length).tokens().expand(2, -1, -1), own)
            row = part.last_query(length).tokens()
            assert torch.equal(row[:, 0].expand(2, -1), own[:, -1])
            first = 16 * (length // 33)
            rows = part.rows(first, length).tokens() & part.of(length).tokens()[:, first:]
            assert torch.equal(rows.expand(2, -1, -1), own[:, first:])
    assert whole.of(37) is whole.of(37)
    both = PatternLayouts(SlidingWindow(), heads=2, block=16)
    assert both.of(48).tokens()[0].sum() == 7 * 256
    with pytest.raises(ValueError, match="global block 6 of a length with 3 blocks"):
        PatternLayouts(pattern, heads=2, block=16).of(37)
    with pytest.raises(ValueError, match="begins is True, but causal is not"):
        Fixed().layout(64, heads=1, begins=True)
    with pytest.raises(ValueError, match="from token 8 on of 32; give a multiple of block = 16"):
        both.rows(8, 32)


def test_layouts_that_are_refused():
    with pytest.raises(ValueError, match="block is 20; it must be a multiple of 16"):
        PatternLayouts(SlidingWindow(), heads=2, block=20)
    with pytest.raises(TypeError, match="give a pattern of pyops"):
        PatternLayouts("bigbird", heads=2)  # type: ignore[arg-type]
