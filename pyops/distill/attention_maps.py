"""Where a student's attention looks, compared with where its teacher's does: rows of queries in
chunks, computed again in backward, so that no map of T x T exists.

    q [B, T, H, K], k [B, S, G, K]   queries 0 .. r-1    -> scores [B, H, r, S] -> numbers [B, r]
                                     queries r .. 2r-1   -> ...

"divergence"   KL(teacher's row, student's row)                MiniLM (Wang et al., 2020, 3.1)
"scores"       mean of (student's - teacher's scores)^2        TinyBERT (Jiao et al., 2020, 4.2)

Where the models have other numbers of heads, each of the teacher's is compared with a mixture of
the student's, whose weights learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pyops.distill.student import blocks_of
from pyops.tensor_parallel import ParallelAttention

__all__ = ["ATTENTION", "AttentionScores", "HeadMap", "attention_difference", "recorded_attention"]

ATTENTION = ("divergence", "scores")
CHUNK_BYTES = 16 << 20  # of one side's scores of a chunk


@dataclass(frozen=True)
class AttentionScores:
    """Scores of self-attention, given as what they are computed from."""

    q: Tensor
    """[B, T, H, K]."""
    k: Tensor
    """[B, S, G, K], of which H / G neighboring heads of queries share each."""
    scale: float
    """By which products are multiplied."""
    causal: bool = False
    """Whether a query sees the keys up to its own place alone."""
    mask: Tensor | None = None
    """bool [B, S], True where a key may be seen; None: all may."""

    def rows(self, q: Tensor, k: Tensor) -> Tensor:
        """[B, H, r, S] of queries q [B, r, H, K], in fp32 at least."""
        shared = q.shape[2] // k.shape[2]
        keys = k.repeat_interleave(shared, dim=2) if shared > 1 else k
        wide = torch.promote_types(q.dtype, torch.float32)
        return torch.einsum("brhk,bshk->bhrs", q.to(wide), keys.to(wide)) * self.scale

    def seen(self, start: int, stop: int) -> Tensor:
        """bool [B or 1, 1, r or 1, S] of queries [start, stop)."""
        keys = torch.arange(self.k.shape[1], device=self.k.device)
        found = keys.new_ones(1, 1, 1, len(keys), dtype=torch.bool)
        if self.causal:
            places = torch.arange(start, stop, device=keys.device)
            found = (keys[None] <= places[:, None])[None, None]
        return found if self.mask is None else found & self.mask[:, None, None, :]


class HeadMap(nn.Module):
    """A mixture of the student's heads for each of the teacher's; at first each has a share of
    those that lie at its place.

    Args:
        student_heads: how many the student has.
        teacher_heads: how many the teacher has.
    """

    def __init__(self, student_heads: int, teacher_heads: int) -> None:
        super().__init__()
        own, other = (torch.arange(n) / n for n in (student_heads, teacher_heads))
        near = -((own[None] - other[:, None]).abs() * 4 * student_heads)
        self.weight = nn.Parameter(near)

    def forward(self) -> Tensor:
        """[teacher's heads, student's heads], of which each row sums to 1."""
        return self.weight.softmax(1)


def attention_difference(
    student: AttentionScores,
    teacher: AttentionScores,
    *,
    kind: str = "divergence",
    heads: HeadMap | None = None,
    counts: Tensor | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """How far the student's attention is from the teacher's: the mean over the teacher's heads and
    the queries that count, in fp32 (fp64 of fp64).

    Memory is linear in T: the scores of a chunk of queries exist at a time, in backward again.

    Args:
        student: it takes the gradient.
        teacher: of the same tokens; what it sees is what is compared.
        kind: of `ATTENTION`.
        heads: needed where the numbers of heads differ.
        counts: bool [B, T], queries that count; None: all.
        chunk_rows: queries at a time; None: as many as have scores of 16 MiB.

    Raises:
        ValueError: other tokens, other numbers of heads without a map, a teacher that requires
            gradients.
    """
    _check(student, teacher, kind, heads)
    batch, length, own = student.q.shape[:3]
    row_bytes = 4 * batch * max(own, teacher.q.shape[2]) * teacher.k.shape[1]
    size = chunk_rows or max(1, CHUNK_BYTES // max(1, row_bytes))
    total = student.q.new_zeros((), dtype=torch.promote_types(student.q.dtype, torch.float32))
    count = total.new_zeros(())
    for start in range(0, length, size):
        span = slice(start, min(start + size, length))
        seen = teacher.seen(span.start, span.stop)
        weighs = seen.any(-1)[:, 0].expand(batch, span.stop - start).to(total.dtype)
        if counts is not None:
            weighs = weighs * counts[:, span]
        rows: Tensor = checkpoint(
            _compared_rows,
            (student, teacher),
            (student.q[:, span], student.k, None if heads is None else heads.weight),
            (teacher.q[:, span], teacher.k, seen),
            kind,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        total, count = total + (rows * weighs).sum(), count + weighs.sum()
    return total / count.clamp(min=1)


def _compared_rows(
    sides: tuple[AttentionScores, AttentionScores],
    own: tuple[Tensor, Tensor, Tensor | None],
    other: tuple[Tensor, Tensor, Tensor],
    kind: str,
) -> Tensor:
    """[B, r], the mean over the teacher's heads."""
    (q, k, weight), (teacher_q, teacher_k, seen) = own, other
    s, t = sides[0].rows(q, k), sides[1].rows(teacher_q, teacher_k)
    mix = None if weight is None else weight.softmax(1).to(s.dtype)
    if kind == "scores":
        s = s if mix is None else torch.einsum("ts,bsrk->btrk", mix, s)
        away = (s - t).square() * seen
        return (away.sum(-1) / seen.sum(-1).clamp(min=1)).mean(1)
    low = torch.finfo(s.dtype).min
    log_q, log_p = (x.masked_fill(~seen, low).log_softmax(-1) for x in (s, t))
    if mix is not None:
        mixed = torch.einsum("ts,bsrk->btrk", mix, log_q.exp())
        log_q = mixed.clamp(min=torch.finfo(s.dtype).tiny).log()
    return (log_p.exp() * (log_p - log_q)).masked_fill(~seen, 0.0).sum(-1).mean(1)


def _check(
    student: AttentionScores, teacher: AttentionScores, kind: str, heads: HeadMap | None
) -> None:
    if kind not in ATTENTION:
        raise ValueError(f"kind is {kind!r}; choose one of {', '.join(ATTENTION)}")
    if student.q.shape[:2] != teacher.q.shape[:2] or student.k.shape[:2] != teacher.k.shape[:2]:
        raise ValueError(
            f"the student's queries are {list(student.q.shape)} and keys {list(student.k.shape)}, "
            f"the teacher's {list(teacher.q.shape)} and {list(teacher.k.shape)}; both must be of "
            "the same tokens"
        )
    if teacher.q.requires_grad or teacher.k.requires_grad:
        raise ValueError("the teacher's queries require gradients; call it under torch.no_grad()")
    own, other = student.q.shape[2], teacher.q.shape[2]
    if heads is None and own != other:
        raise ValueError(
            f"the student has {own} heads, the teacher {other}; give heads=HeadMap({own}, {other}) "
            "and its parameters to the optimizer"
        )
    if heads is not None and heads.weight.shape != (other, own):
        raise ValueError(
            f"heads is a map of {heads.weight.shape[1]} heads to {heads.weight.shape[0]}; the "
            f"student has {own}, the teacher {other}"
        )


@contextmanager
def recorded_attention(
    model: nn.Module, layers: Sequence[int]
) -> Iterator[dict[int, AttentionScores]]:
    """What the self-attention of these layers computes scores from, while a model of pyops is
    called within.

    Args:
        model: GPT, BERT or ViT, whole on this rank.
        layers: numbers of layers; negative ones count from the last.

    Raises:
        ValueError: a number that is no layer; a model whose layers have no attention of pyops, or
            one that ranks share.
    """
    _, blocks = blocks_of(model)
    found: dict[int, AttentionScores] = {}
    handles = []
    for number in set(layers):
        if not -len(blocks) <= number < len(blocks):
            raise ValueError(
                f"{type(model).__name__} has layers 0 to {len(blocks) - 1}; there is no {number}"
            )
        layer = _attention_of(model, blocks[number])

        def keep(
            core: nn.Module, given: tuple[Any, ...], named: dict[str, Any], number: int = number
        ) -> None:
            q, k = given[:2]
            seen = named["seen"]
            if named.get("bias") is not None or seen.documents is not None:
                raise ValueError(
                    "attention maps are compared without biases and documents; leave them out"
                )
            mask = seen.mask if seen.mask is None or seen.mask.dim() == 2 else None
            if mask is not seen.mask:
                raise ValueError("attention maps are compared with masks [B, S] of keys alone")
            found[number] = AttentionScores(q, k, named["scale"], seen.causal, mask)

        handles.append(layer.core.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _attention_of(model: nn.Module, block: nn.Module) -> Any:
    layers = [m for m in block.modules() if isinstance(m, ParallelAttention) and not m.cross]
    if len(layers) != 1 or layers[0].ranks.size != 1:
        ranks = layers[0].ranks.size if layers else 1
        raise ValueError(
            f"a layer of {type(model).__name__} has {len(layers)} self-attentions of pyops, on "
            f"{ranks} ranks; attention maps are compared of one, whole on a rank"
        )
    return layers[0]
