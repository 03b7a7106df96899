"""TokenStep: the forward of a GPT that adds one token to each row, as a list of kernels.

    block    x, added -> norm1 -> q k v -> rotary, kept keys and values, attention -> output
             x, added -> norm2 -> up -> activation -> down             (added: not yet added to x)

The modules compute the same, with checks, hooks and look-ups at every call, which at one row took
four times as long as the products. Here each layer is asked once for what it computes, and the
addition of the residual is left to the norm behind it, which does both in one pass. In fp32 what
stands between the products of attention is one kernel, whose sums have an order of their own; in
other dtypes three, with the bits of the modules. Blocks of fp32 that are alike, for as many rows as
the products' kernels take, are one call, with the bits of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.models.gpt import GPT, GPTBlock, GPTEmbedding
from pyops.models.model_layout import AddedEmbedding
from pyops.models.rotary import Rotary
from pyops.models.vocabulary_head import VocabularyHead
from pyops.ops.decoding.prepared import (
    PreparedNorm,
    PreparedProduct,
    cached_attention,
    prepared_activation,
    prepared_linear,
    turned,
)
from pyops.ops.decoding.token_attention import token_attention_
from pyops.ops.decoding.token_blocks import BlockForm, token_blocks_
from pyops.tensor_parallel import (
    LayerNorm,
    ParallelAttention,
    ParallelMLP,
    RMSNorm,
    RowCache,
    RowSpan,
    VocabParallelEmbedding,
)
from pyops.tensor_parallel.functional.scores import Core
from pyops.torch_private import has_global_hooks, is_called_plainly

__all__ = ["TokenStep", "token_step"]


class _Unknown(Exception):
    """A layer computes something that is not written down here."""


class TokenStep:
    """One forward of a whole model for spans of one token a row. It holds the
    parameters that the model has when it is made: whoever changes the model makes another.

    Args:
        model: In eval mode, on the CPU, of one rank.
    """

    def __init__(self, model: GPT) -> None:
        self._embedding = _embedding(model.embedding)
        self._blocks = [_BlockStep(block) for block in model.blocks]
        self._stack = _stack(self._blocks)
        self._norm = _norm(model.head.norm)
        self._logits = _logits(model.head.output)

    def hidden(self, span: RowSpan, tokens_R1: Tensor, caches: Sequence[RowCache]) -> Tensor:
        """[R, 1, D], what the blocks make of the tokens; keys and values are added to the caches.

        Args:
            span: Where the tokens stand.
            tokens_R1: The next token of each row.
            caches: Of the blocks.
        """
        x, added = self._embedding(tokens_R1[:, 0], span), None
        if self._stack is not None and x.shape[0] <= self._stack.most_rows:
            return self._stack(x, span, caches)[:, None]
        for block, cache in zip(self._blocks, caches, strict=True):
            cache.span = span
            x, added = block(x, added, span, cache)
        return (x if added is None else x + added)[:, None]

    def logits(self, x_R1D: Tensor) -> Tensor:
        """[R, V] of what `hidden` gave."""
        return self._logits(self._norm(x_R1D[:, 0], None)[0])


class _BlockStep:
    """(x, added) [R, D] -> the same behind a block."""

    def __init__(self, block: Any) -> None:
        _known(block, GPTBlock)
        attention, mlp = block.attention, block.mlp
        _known(attention, ParallelAttention)
        _known(attention.core, Core)
        _known(mlp, ParallelMLP)
        if attention.cross or attention.layouts is not None:
            raise _Unknown
        self.norm1, self.norm2 = _norm(block.norm1), _norm(block.norm2)
        merged = (attention.qkv,) if attention.merged else (attention.q, attention.kv)
        self.inner = [_product(layer) for layer in merged]
        self.output, self.up, self.down = map(_product, (attention.output, mlp.up, mlp.down))
        self.width, self.scale = attention.head_dim, attention.scale
        self.groups = attention.num_kv_heads
        self.interleaved: bool = attention.interleaved
        self.activation = prepared_activation(mlp.activation, gated=mlp.gated)
        self.form = BlockForm(
            width=self.width,
            scale=self.scale,
            eps=self.norm1.eps,
            rms=self.norm1.rms,
            activation=mlp.activation,
            gated=mlp.gated,
            interleaved=self.interleaved,
        )
        self.rotary: Rotary | None = block.rotary

    @property
    def parts(self) -> list[PreparedNorm | PreparedProduct]:
        """In the order of `token_blocks_`."""
        return [self.norm1, *self.inner, self.output, self.norm2, self.up, self.down]

    def __call__(
        self, x: Tensor, added: Tensor | None, span: RowSpan, cache: RowCache
    ) -> tuple[Tensor, Tensor]:
        h, x = self.norm1(x, added)
        if self.rotary is not None and span.turns is None:
            span.turns = self.rotary(1, positions_BT=span.places_RT)
        y = (self._attended if x.dtype == torch.float32 else self._attended_apart)(h, span, cache)
        h, x = self.norm2(x, self.output(y))
        return x, self.down(self.activation(self.up(h)))

    def _attended(self, h: Tensor, span: RowSpan, cache: RowCache) -> Tensor:
        """[R, H K]"""
        heads = self._heads(h)
        return token_attention_(
            heads,
            cache.room(heads[1]),
            span.places_RT,
            None if self.rotary is None else span.turns,
            first_row=span.begin,
            scale=self.scale,
            interleaved=self.interleaved,
        )

    def _attended_apart(self, h: Tensor, span: RowSpan, cache: RowCache) -> Tensor:
        """The same, op by op."""
        q, k, v = self._heads(h)
        if self.rotary is not None and span.turns is not None:
            cos, sin = span.turns
            q = turned(q, cos, sin, self.interleaved)
            k = turned(k, cos, sin, self.interleaved)
        k, v = cache.append(k, v)
        y = cached_attention(q, k, v, span.mask_RS, scale=self.scale)
        return y.view(h.shape[0], -1)

    def _heads(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [R, 1, H, K], k and v [R, 1, G, K]."""
        rows, width = h.shape[0], self.width
        if len(self.inner) == 1:
            q, k, v = self.inner[0](h).view(rows, 1, -1, 3, width).unbind(3)
            return q, k, v
        q = self.inner[0](h).view(rows, 1, -1, width)
        k, v = self.inner[1](h).view(rows, 1, -1, 2, width).unbind(3)
        return q, k, v


class _BlockStack:
    """x [R, D] fp32 -> the same behind all blocks, in one call."""

    def __init__(self, blocks: Sequence[_BlockStep]) -> None:
        parts = [part for block in blocks for part in block.parts]
        operands = [operand for part in parts for operand in part.operands]
        self._blocks, self._form = (operands, [part.kind for part in parts]), blocks[0].form
        self._rotary = blocks[0].rotary
        self._heads = [torch.empty(1, 1, block.groups, block.width) for block in blocks]
        self.most_rows = min(p.most_rows for p in parts if isinstance(p, PreparedProduct))

    def __call__(self, x: Tensor, span: RowSpan, caches: Sequence[RowCache]) -> Tensor:
        if self._rotary is not None and span.turns is None:
            span.turns = self._rotary(1, positions_BT=span.places_RT)
        kept = []
        for cache, heads in zip(caches, self._heads, strict=True):
            cache.span = span
            kept.append(cache.room(heads))
        keys, values = zip(*kept, strict=True)
        return token_blocks_(
            x,
            self._blocks,
            (keys, values),
            span.places_RT,
            span.turns,
            first_row=span.begin,
            form=self._form,
        )


def _stack(blocks: Sequence[_BlockStep]) -> _BlockStack | None:
    """None for blocks of other dtypes than fp32, and for some that are not alike."""
    first = blocks[0]
    numbers = [t for block in blocks for part in block.parts for t in part.operands]
    floats = {t.dtype for t in numbers if t.is_floating_point() and t.itemsize > 1}
    alike = all(
        block.form == first.form
        and block.rotary is first.rotary
        and len(block.inner) == len(first.inner)
        and (block.norm2.eps, block.norm2.rms) == (first.form.eps, first.form.rms)
        for block in blocks
    )
    if floats != {torch.float32} or not alike or not all(t.is_contiguous() for t in numbers):
        return None
    return _BlockStack(blocks)


def token_step(model: GPT, cache_dtype: torch.dtype | None) -> TokenStep | None:
    """The model as a list of kernels; None where it has something that they would pass over, such
    as hooks, adapters that are not merged, layers that ranks share, or dropout.

    Args:
        model: Any GPT.
        cache_dtype: Of keys and values; None: that which they are computed in.
    """
    layout = model.layout
    alone = layout.ranks.size == 1 and layout.grid is None and layout.context is None
    whole = len(model.blocks) == model.config.num_layers
    if not (alone and whole) or torch.is_autocast_enabled("cpu") or has_global_hooks():
        return None
    numbers = [t for t in _numbers(model) if t.is_floating_point()]
    dtype = model.head.norm.weight.dtype
    if any(t.device.type != "cpu" for t in numbers) or cache_dtype not in (None, dtype):
        return None
    if any(p.dtype != dtype for p in model.parameters()):
        return None
    if any(m.training or not is_called_plainly(m) for m in model.modules()):
        return None
    try:
        return TokenStep(model)
    except _Unknown:
        return None


def _numbers(model: nn.Module) -> Iterable[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _known(module: Any, kind: type) -> None:
    """A subclass may compute something else."""
    if type(module) is not kind:
        raise _Unknown


def _product(layer: Any) -> PreparedProduct:
    """What a linear layer computes, its bias added."""
    made = getattr(layer, "token_product", None)
    product: PreparedProduct | None = None if made is None else made()
    if product is None:
        raise _Unknown
    return product


def _norm(norm: Any) -> PreparedNorm:
    if type(norm) not in (LayerNorm, RMSNorm):
        raise _Unknown
    return PreparedNorm(norm.weight, norm.bias, eps=norm.eps, offset=getattr(norm, "offset", None))


def _embedding(embedding: Any) -> Callable[[Tensor, RowSpan], Tensor]:
    _known(embedding, GPTEmbedding)
    _known(embedding.token, VocabParallelEmbedding)
    words, position = embedding.token.weight, embedding.position
    places = None
    if position is not None:
        _known(position, AddedEmbedding)
        places = position.weight

    def embedded(tokens_R: Tensor, span: RowSpan) -> Tensor:
        x = functional.embedding(tokens_R, words)
        if places is None:
            return x
        return x + functional.embedding(span.places_RT[:, 0], places)

    return embedded


def _logits(output: Any) -> PreparedProduct:
    _known(output, VocabularyHead)
    if output.adapter is not None and output.adapter.enabled:
        raise _Unknown
    return prepared_linear(output.weight, output.bias)
