"""torch.nn.MultiheadAttention with the heads of this rank: the same call, the same names of
parameters."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.flat import Placement
from pyops.tensor_parallel.convert.head_counts import HeadCounts
from pyops.tensor_parallel.convert.module_swap import filled
from pyops.tensor_parallel.functional.ranks import Ranks
from pyops.tensor_parallel.functional.scores import attend
from pyops.tensor_parallel.layers.layer_config import RowConfig
from pyops.tensor_parallel.layers.linear import RowParallelLinear

__all__ = ["MultiheadAttention", "check_multihead"]


def check_multihead(module: nn.MultiheadAttention, name: str) -> None:
    """ValueError for options that the parallel one does not have."""
    if module.in_proj_weight is None:
        raise ValueError(
            f"{name}: keys or values of another width (kdim, vdim) can't be cut; use the "
            "width of the queries"
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            f"{name}: add_bias_kv and add_zero_attn can't be cut; make the module without them"
        )


class MultiheadAttention(nn.Module):
    """forward as torch.nn.MultiheadAttention's, but always without the weights: (output, None).
    Inputs are of three dims.

    Made from an existing one, whose values it takes.

    Args:
        in_proj_weight: [3, heads / ranks * K, D]; the whole one is [3, D, D]. Its query, key and
            value must come through `Enter`, which sums their gradients over the ranks.

    Attributes:
        calls_torch: Whether torch's function computes attention, also where nothing is dropped.
    """

    calls_torch = False

    def __init__(
        self,
        whole: nn.MultiheadAttention,
        heads: HeadCounts,
        *,
        ranks: Ranks,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        D = whole.embed_dim
        self.embed_dim, self.num_heads, self.head_dim = D, heads.local, heads.head_dim
        self.whole_heads, self.batch_first, self.dropout = (
            heads.num_heads,
            whole.batch_first,
            whole.dropout,
        )
        self.stacked = 3
        self._qkv_same_embed_dim = (
            False  # torch.nn.TransformerEncoderLayer then computes in no way of its own
        )
        shapes = {
            "in_proj_weight": (3, D, D),
            **({} if whole.in_proj_bias is None else {"in_proj_bias": (3, D)}),
        }
        self.placements = {
            key: Placement.cut(shape, dim=1, rank=ranks.rank, ranks=ranks.size, unit=heads.head_dim)
            for key, shape in shapes.items()
        }
        for key, place in self.placements.items():
            old = whole.get_parameter(key)
            self.register_parameter(
                key,
                nn.Parameter(place.take(old.view(shapes[key])), requires_grad=old.requires_grad),
            )
        if whole.in_proj_bias is None:
            self.register_parameter("in_proj_bias", None)
        self.first_head = self.placements["in_proj_weight"].start // heads.head_dim
        out = RowParallelLinear(
            D,
            D,
            bias=whole.out_proj.bias is not None,
            config=RowConfig(unit=heads.head_dim, seed=None),
            group=ranks,
            sequence_parallel=sequence_parallel,
            device="meta",
            dtype=whole.in_proj_weight.dtype,
        )
        self.out_proj = filled(out, whole.out_proj, {})
        self.train(whole.training)

    in_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        if query.dim() != 3:
            raise ValueError(
                f"query is {tuple(query.shape)}; when parallel it must be of three dims, "
                "a batch of sequences"
            )
        q, k, v = (
            self._heads(functional.linear(x, w, b))
            for x, w, b in zip(
                (query, key, value), self.in_proj_weight, self._biases(), strict=True
            )
        )
        # As torch's own, where no weights are wanted: the mask is that of the hint.
        causal = self.calls_torch and is_causal and key_padding_mask is None
        mask = None if causal else self._mask(key_padding_mask, attn_mask, q.dtype)
        p = self.dropout if self.training else 0.0
        if p or self.calls_torch:  # which `pyops.parallel` lets draw by counters, or go over ranks
            y = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal
            )
            y = y.transpose(1, 2).flatten(2)
        else:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            y = attend(q, k, v, scale=self.head_dim**-0.5, bias=mask)
        return self.out_proj(y if self.batch_first else y.transpose(0, 1)), None

    def _biases(self) -> list[Tensor | None]:
        return [None] * 3 if self.in_proj_bias is None else list(self.in_proj_bias)

    def _heads(self, y: Tensor) -> Tensor:
        """[B, own heads, T, K]."""
        result: Tensor = (
            (y if self.batch_first else y.transpose(0, 1))
            .unflatten(-1, (-1, self.head_dim))
            .transpose(1, 2)
        )
        return result

    def _mask(
        self, padding: Tensor | None, mask: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """What is added to the scores: padding [B, S] and mask [T, S] or [B H, T, S], bool where
        True is hidden, or numbers."""
        added = None
        if mask is not None:
            if mask.dim() == 3:
                mask = mask.unflatten(0, (-1, self.whole_heads))[
                    :, self.first_head : self.first_head + self.num_heads
                ]
                missing = self.num_heads - mask.shape[1]
                mask = functional.pad(mask, (0, 0, 0, 0, 0, missing))
            added = _numbers(mask, dtype)
        if padding is not None:
            hidden = _numbers(padding, dtype)[:, None, None]
            added = hidden if added is None else added + hidden
        return added


def _numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
