"""Attention maps in chunks against whole ones, and the memory that they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.distill import (
    AttentionScores,
    HeadMap,
    attention_difference,
    freeze,
    recorded_attention,
    student_from_layers,
)
from pyops.models import BERT, GPT, BERTConfig, GPTConfig

pytestmark = pytest.mark.cpu_only
SIZES = {"vocab_size": 31, "sequence_length": 16, "num_layers": 3, "dim": 16}


def drawn(heads: int, groups: int, seed: int, **options: Any) -> AttentionScores:
    generator = torch.Generator().manual_seed(seed)
    q, k = (
        torch.randn(2, 9, n, 4, generator=generator, dtype=torch.float64) for n in (heads, groups)
    )
    return AttentionScores(q, k, scale=0.5, **options)


def whole(
    student: AttentionScores, teacher: AttentionScores, kind: str, mix: Tensor | None, seen: Tensor
) -> Tensor:
    """Of maps [B, H, T, S], by torch's own KL."""
    maps = []
    for side in (student, teacher):
        keys = side.k.repeat_interleave(side.q.shape[2] // side.k.shape[2], dim=2)
        maps.append(side.scale * torch.einsum("bthk,bshk->bhts", side.q, keys))
    if kind == "scores":
        s, t = maps
        s = s if mix is None else torch.einsum("oh,bhts->bots", mix, s)
        return ((s - t) ** 2 * seen).sum(-1).div(seen.sum(-1)).mean(1)
    s, t = (x.masked_fill(~seen, -torch.inf).softmax(-1) for x in maps)
    s = s if mix is None else torch.einsum("oh,bhts->bots", mix, s)
    found = torch.nn.functional.kl_div(
        torch.where(seen, s, 1.0).log(), torch.where(seen, t, 0.0), reduction="none"
    )
    return found.sum(-1).mean(1)


@pytest.mark.parametrize("kind", ["divergence", "scores"])
@pytest.mark.parametrize("teacher_heads", [4, 6])
def test_chunks_are_whole_maps(kind: str, teacher_heads: int):
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    student = drawn(4, 2, 0)
    student.q.requires_grad_()
    student.k.requires_grad_()
    teacher = drawn(teacher_heads, teacher_heads, 1, causal=True, mask=mask)
    heads = HeadMap(4, teacher_heads).double() if teacher_heads != 4 else None
    leaves = [student.q, student.k, *([] if heads is None else [heads.weight])]
    seen = torch.ones(9, 9, dtype=torch.bool).tril() & mask[:, None, None]
    counts = torch.ones(2, 9, dtype=torch.bool)
    counts[0, 3] = False
    mix = None if heads is None else heads()
    expected = whole(student, teacher, kind, mix, seen)[counts].mean()
    gradients = torch.autograd.grad(expected, leaves)
    for size in (1, 4, None):
        found = attention_difference(
            student, teacher, kind=kind, heads=heads, counts=counts, chunk_rows=size
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        assert found > 0.05
        for own, other in zip(torch.autograd.grad(found, leaves), gradients, strict=True):
            assert other.abs().max() > 1e-4
            torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-14)


def test_memory_is_linear_in_the_number_of_tokens():
    """No tensor that is kept for backward, or made, has T x S elements."""
    length = 512
    q, k = (torch.randn(1, length, 2, 4, requires_grad=i == 0) for i in range(2))
    student, teacher = AttentionScores(q, k, 0.5), AttentionScores(q.detach(), k, 0.5)
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.untyped_storage().nbytes())
        return x

    made: list[int] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, given: Any = (), named: Any = None):
            found = call(*given, **(named or {}))
            made.extend([found.numel()] if isinstance(found, Tensor) else [])
            return found

    with Count(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attention_difference(student, teacher, chunk_rows=16).backward()
    assert max(made) <= 2 * 16 * length
    assert max(kept) <= 4 * 2 * 16 * length


@pytest.mark.parametrize("causal", [True, False])
def test_maps_of_models(causal: bool):
    """A student that is its teacher has no difference; one of other values has, and learns it."""
    tokens = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = None
    if causal:
        teacher = freeze(GPT(GPTConfig(**SIZES, num_heads=4), seed=5))
    else:
        teacher = freeze(BERT(BERTConfig(**SIZES, num_heads=4), seed=5))
        mask = torch.ones(2, 12, dtype=torch.bool)
        mask[0, 8:] = False
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(4)
    student = student_from_layers(teacher, keep=[0, 1])
    named = {} if mask is None else {"mask": mask}
    with torch.no_grad(), recorded_attention(teacher, [0, -1]) as other:
        teacher(tokens, **named)
    with recorded_attention(student, [0, -1]) as own:
        student(tokens, **named)
    assert other[0].causal == causal
    assert (other[0].mask is None) == (mask is None)
    assert attention_difference(own[0], other[0]).detach() < 1e-6
    away = attention_difference(own[-1], other[-1])
    assert away.detach() > 1e-3
    away.backward()
    assert student.blocks[-1].attention.qkv.weight.grad.abs().max() > 1e-6


def test_what_can_not_be_compared():
    student, teacher = drawn(4, 2, 0), drawn(6, 6, 1)
    with pytest.raises(ValueError, match=r"4 heads, the teacher 6; give heads=HeadMap\(4, 6\)"):
        attention_difference(student, teacher)
    with pytest.raises(ValueError, match="a map of 2 heads to 6"):
        attention_difference(student, teacher, heads=HeadMap(2, 6))
    with pytest.raises(ValueError, match="kind is 'L1'"):
        attention_difference(student, student, kind="L1")
    shorter = AttentionScores(teacher.q[:, :5], teacher.k, 0.5)
    with pytest.raises(ValueError, match="the same tokens"):
        attention_difference(student, shorter)
    gpt = GPT(GPTConfig(**SIZES, num_heads=4))
    with pytest.raises(ValueError, match="there is no 7"), recorded_attention(gpt, [7]):
        pass
