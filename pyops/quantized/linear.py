"""QuantizedLinear: a linear layer whose weight is codes, in place of one of torch's, of
transformers' or of pyops.tensor_parallel.

    weights and activations    codes of x, per row --> int32 sums --> scales, bias        exact sums
    weights alone              few rows: in the kernel; many: weights widened for all at once

                    column-parallel                    row-parallel
    a rank holds    rows of codes and their scales     columns of codes, the scales of whole rows
    of x            the same codes on every rank       magnitudes are the largest over all ranks
    of y            its columns                        int32 sums over ranks, then one epilogue

Sums of integers are exact in any order, so that y of int8 layers has the same bits on 1, 2 and 4
ranks. Backward gives the gradient of x as if x had not been rounded (straight-through, Bengio et
al., arXiv:1308.3432), dx = dy W with the decoded W, so that what stands before the layer, or beside
it as an adapter, can be trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.flat import Placement
from pyops.ops.codes.code_rows import FEW, code_rows_product, decode_rows, fits
from pyops.ops.codes.scaled import (
    QuantizedRows,
    int8_product,
    quantize_rows,
    range_scales,
    row_extents,
    scale_product,
    scale_sums_,
)
from pyops.ops.decoding.prepared import PreparedProduct, prepared_code_rows
from pyops.quantized.formats import (
    Codes,
    Int4,
    Int8,
    Scheme,
    pack_nibbles,
    unpack_nibbles,
)
from pyops.quantized.linear_shape import LinearShape, code_placements, largest_over_ranks
from pyops.tensor_parallel import Dropout
from pyops.tensor_parallel.functional.regions import (
    copy,
    gather,
    gather_tokens,
    reduce,
    reduce_scatter_tokens,
    scatter,
)
from pyops.tensor_parallel.layers.low_rank import PartDropout

__all__ = ["QuantizedLinear"]


class QuantizedLinear(nn.Module):
    """y = x W^T + b with W as codes. `pyops.quantized.convert` makes them.

    Args:
        shape: What the layer is.
        scheme: Of weights and activations.
        codes: The codes of this rank's weight [.., out, in].
        bias: As of the layer in whose place this one stands.
        placements: Of weight and bias in a layer that ranks share.
        input_range: The least and the greatest number of x, fp32 [] each, for activations with one
            scale that is found beforehand.
    """

    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None
    sums: Tensor | None
    whole_sums: Tensor | None
    input_range: Tensor | None
    bias: nn.Parameter | None
    placements: dict[str, Placement]
    adapter: Any

    def __init__(
        self,
        shape: LinearShape,
        scheme: Scheme,
        *,
        codes: Codes,
        bias: nn.Parameter | None = None,
        placements: dict[str, Placement] | None = None,
        input_range: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.scheme = shape, scheme
        self.width = codes.codes.shape[-1]
        own = dict(placements or {})
        self.weight_place = weight = own.pop("weight", None)
        self.placements = own
        kept = codes.codes
        if isinstance(scheme.weights, Int4):
            kept = pack_nibbles(kept)
        self.register_buffer("codes", kept.contiguous())
        grouped = scheme.weights.group is not None
        self.register_buffer("scales", codes.scales.contiguous())
        zeros = codes.zero_points
        self.register_buffer("zero_points", None if zeros is None else zeros.contiguous())
        self.code_placements = (
            {} if weight is None else code_placements(weight, codes, kept.shape[-1], grouped)
        )
        self.register_buffer("sums", None)
        self.register_buffer("whole_sums", None, persistent=False)
        self.register_buffer(
            "input_range", None if input_range is None else torch.stack(list(input_range)).float()
        )
        self.register_parameter("bias", bias)
        self.register_module("adapter", None)
        self.renew_sums()

    def renew_sums(self) -> None:
        """Sum the codes of each output anew, where zero points of activations need the sums.
        Collective where ranks cut the layer by rows."""
        activations, ranks = self.scheme.activations, self.shape.ranks
        if not isinstance(activations, Int8) or activations.symmetric:
            return
        self.sums = self.codes.flatten(0, -2).sum(1, dtype=torch.int32)
        rows = self.shape.cut == "row" and ranks.size > 1
        self.whole_sums = ranks.sum_(self.sums.clone()).wait() if rows else self.sums

    @property
    def weight(self) -> Tensor:
        """The codes as int8, for what asks a layer for the device or the dtype of its weight:
        models of transformers leave activations as they are beside weights of int8."""
        return self.codes.view(torch.int8)

    @property
    def in_features(self) -> int:
        """Width of x over all ranks."""
        return self.shape.in_features

    @property
    def out_features(self) -> int:
        """Width of y over all ranks."""
        return self.shape.out_features

    @property
    def stacked(self) -> int:
        """How many matrices [out, in] the weight is; 0: it is one."""
        return self.codes.shape[0] if self.codes.dim() == 3 else 0

    def low_rank_places(self, rank: int) -> dict[str, Placement]:
        """What this rank holds of the factors A and B of an adapter of so many rows."""
        shape, weight = self.shape, self.weight_place
        if weight is None:
            weight = Placement.whole((shape.out_features, shape.in_features), rank=0, ranks=1)
        here: dict[str, Any] = {"rank": shape.ranks.rank, "ranks": shape.ranks.size}
        if shape.cut == "row":
            return {
                "A": replace(weight, global_shape=(rank, shape.in_features)),
                "B": Placement.whole((shape.out_features, rank), partial=True, **here),
            }
        return {
            "A": Placement.whole((rank, shape.in_features), partial=True, **here),
            "B": replace(weight, global_shape=(*weight.global_shape[:-1], rank)),
        }

    def low_rank_dropout(self, p: float) -> nn.Module:
        """Dropout of x before A."""
        shape, weight = self.shape, self.weight_place
        if weight is None or shape.cut == "whole":
            return nn.Dropout(p)
        if shape.cut == "row":
            return PartDropout(p, width=shape.in_features, start=weight.start)
        return Dropout(
            p,
            width=shape.in_features,
            group=shape.ranks,
            sequence_parallel=shape.sequence_parallel,
        )

    def as_codes(self) -> Codes:
        """The codes of this rank's weight, one in each byte."""
        weights = self.scheme.weights
        codes = self.codes
        if isinstance(weights, Int4):
            codes = unpack_nibbles(codes, self.width, weights.symmetric)
        return Codes(codes, self.scales, self.zero_points, weights, -1)

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """This rank's weight [.., out, in] as numbers.

        Args:
            dtype: Of the result; rounded from fp32.
        """
        narrow = dtype if dtype.itemsize < 4 else torch.float32
        weight = decode_rows(*self._flat_codes(), width=self.width, bits=self._bits, dtype=narrow)
        return weight.view(*self.codes.shape[:-1], self.width).to(dtype)

    @property
    def _bits(self) -> int:
        """Of a code as it is held."""
        return 4 if isinstance(self.scheme.weights, Int4) else 8

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Moves the layer; codes stay fp8 and scales fp32 where the model is cast."""
        kept = {name: getattr(self, name) for name in ("codes", "scales", "input_range")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = getattr(self, name)
            if before is not None and after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """y; with skip_bias (y without the bias, the bias or None)."""
        shape, ranks = self.shape, self.shape.ranks
        if shape.cut == "row" and shape.moves and ranks.size > 1:
            missing = self.width * ranks.size - shape.in_features
            x = scatter(functional.pad(x, (0, missing)), dim=-1, group=ranks)
        if x.shape[-1] != self.width:
            raise ValueError(
                f"x is {tuple(x.shape)}, but QuantizedLinear({self.extra_repr()}) takes "
                f"[..., {self.width}] here"
            )
        x = _autocast(x)
        bias = None if shape.skip_bias else self.bias
        y = self._row(x, bias) if shape.cut == "row" else self._column(x, bias)
        return (y, self.bias) if shape.skip_bias else y

    def _column(self, x: Tensor, bias: Tensor | None) -> Tensor:
        shape, ranks, adapter = self.shape, self.shape.ranks, self.adapter
        y = _product(self._entered(x), self, bias)
        if adapter is not None and adapter.enabled:
            h = self._entered(adapter.inputs(x))
            y = adapter.add(y, functional.linear(h, adapter.factor("A", h)))
        if shape.cut == "column" and shape.moves and ranks.size > 1:
            y = gather(y, dim=-1, duplicated=True, group=ranks)[..., : shape.out_features]
        return y

    def _entered(self, x: Tensor) -> Tensor:
        """x where a column-parallel layer begins: all tokens, and a gradient that is summed."""
        shape = self.shape
        if shape.cut != "column":
            return x
        enter = gather_tokens if shape.sequence_parallel else copy
        return enter(x, group=shape.ranks)

    def _row(self, x: Tensor, bias: Tensor | None) -> Tensor:
        ranks, adapter = self.shape.ranks, self.adapter
        more: Tensor | None = None
        if adapter is not None and adapter.enabled:
            h = adapter.scale * adapter.down(x)
            more = functional.linear(h, adapter.factor("B", h))
        if self.scheme.activations is not None:
            y = _product(x, self, bias)  # the whole sum
            return y if more is None else y + self._summed(more)
        if ranks.size == 1:
            y = _product(x, self, bias)
            return y if more is None else y + more
        part = _product(x.float(), self, None)
        y = self._summed(part if more is None else part + more).to(x.dtype)
        if bias is None:
            return y
        # Of its gradient a rank has the sum over its own tokens
        shared = self.shape.sequence_parallel
        return y + (copy(bias, group=ranks) if shared else bias).to(y.dtype)

    def _summed(self, part: Tensor) -> Tensor:
        over = reduce_scatter_tokens if self.shape.sequence_parallel else reduce
        return over(part, group=self.shape.ranks)

    def token_product(self) -> PreparedProduct | None:
        """x [rows, in] -> [rows, out], the bias added, for few rows without gradients: its operands
        are checked here and not at each call. None where ranks share the layer, or an adapter adds
        to it."""
        adapter = self.adapter
        if self.shape.ranks.size > 1 or (adapter is not None and adapter.enabled):
            return None
        flat = None if self.bias is None else self.bias.detach().float().flatten()
        few = self._kernel_takes and self.scheme.activations is None
        return prepared_code_rows(
            *self._flat_codes(),
            flat,
            bits=self._bits,
            most_rows=FEW if few else 0,
            otherwise=lambda x: _computed(x, self, self.bias),
        )

    @property
    def _kernel_takes(self) -> bool:
        """Whether there is a kernel for few rows times these codes."""
        out = prod(self.codes.shape[:-1])
        return fits(self.width, self.scales.numel() // out, self._bits)

    def _flat_codes(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, scales and zero points as matrices of a row for each output."""
        out, zeros = prod(self.codes.shape[:-1]), self.zero_points
        flat = None if zeros is None else zeros.reshape(out, -1)
        return self.codes.reshape(out, -1), self.scales.reshape(out, -1), flat

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias without a gradient; of a row-parallel layer with codes of activations over
        all ranks, else with this rank's columns alone.

        Args:
            x: [rows, in of this rank].
            bias: [.., out], or None.
        """
        flat = None if bias is None else bias.detach().float().flatten()
        if self.scheme.activations is not None:
            return self._integer_product(x, flat)
        if len(x) <= FEW and self._kernel_takes and x.dtype != torch.float64:
            return code_rows_product(x, *self._flat_codes(), flat, bits=self._bits)
        weight = self.decoded(x.dtype).flatten(0, -2)
        return functional.linear(x, weight, None if flat is None else flat.to(x.dtype))

    def _integer_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        ranks = self.shape.ranks
        shared = self.shape.cut == "row" and ranks.size > 1
        rows = self._rows(x, shared=shared)
        weight, scales = self.codes.flatten(0, -2), self.scales.flatten()
        acc = int8_product(rows.codes, weight, self.sums)
        if shared:
            acc = ranks.sum_(acc).wait()
        given = (rows.scales, scales, rows.zero_points, self.whole_sums, bias)
        if x.dtype == torch.float32:
            return scale_sums_(acc, *given)  # nobody else has the sums
        return scale_product(acc, *given, dtype=x.dtype)

    def _rows(self, x: Tensor, *, shared: bool) -> QuantizedRows:
        """Codes of x, with one scale for each row of all ranks."""
        activations = self.scheme.activations
        symmetric = isinstance(activations, Int8) and activations.symmetric
        static = self.input_range
        if not shared and static is None:
            return quantize_rows(x, symmetric=symmetric)
        high = 127 if symmetric else 255
        low = -high if symmetric else 0
        if not shared and static is not None:
            scales, zeros = range_scales(static[0], static[1], low=low, high=high)
            return quantize_rows(x, scales, zeros, symmetric=symmetric)
        lowest, highest = row_extents(x, symmetric=symmetric)
        both = largest_over_ranks(torch.stack([lowest.neg(), highest]), self.shape.ranks)
        lowest, highest = both[0].neg(), both[1]
        if static is not None:  # a row that is not finite on one rank is so on all
            lowest, highest = (
                torch.where(torch.isnan(highest), highest, number) for number in static
            )
        scales, zeros = range_scales(lowest, highest, low=low, high=high)
        return quantize_rows(x, scales, zeros, symmetric=symmetric)

    def extra_repr(self) -> str:
        shape, ranks = self.shape, self.shape.ranks
        shared = f", {shape.cut}, rank {ranks.rank} of {ranks.size}" if ranks.size > 1 else ""
        return (
            f"{shape.in_features}, {shape.out_features}, weights={self.scheme.weights}, "
            f"activations={self.scheme.activations}, bias={self.bias is not None}{shared}"
        )


def _autocast(x: Tensor) -> Tensor:
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _computed(x: Tensor, layer: QuantizedLinear, bias: Tensor | None) -> Tensor:
    """The product of codes, of this rank's own tokens where it leaves each rank its own."""
    narrow = x.float() if x.dtype == torch.float64 else x
    y = layer.product(narrow.reshape(-1, x.shape[-1]), bias).to(x.dtype)
    y = y.view(*x.shape[:-1], -1)
    if _scatters(layer):
        ranks = layer.shape.ranks
        rows = ranks.rows_per_rank(len(y))
        y = functional.pad(y, (0, 0, 0, rows * ranks.size - len(y)))
        y = y[ranks.rank * rows : (ranks.rank + 1) * rows].contiguous()
    return y


class _Product(torch.autograd.Function):
    """The product of codes; its gradient is that of the decoded weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear, bias: Tensor | None) -> Tensor:
        ctx.layer, ctx.dtype, ctx.lead = layer, x.dtype, x.shape[:-1]
        ctx.bias_shape = None if bias is None else (bias.shape, bias.dtype)
        return _computed(x, layer, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        layer: QuantizedLinear = ctx.layer
        if _scatters(layer):
            dy = gather_tokens(dy, group=layer.shape.ranks)[: ctx.lead[0]]
        dbias = None
        if ctx.bias_shape is not None and ctx.needs_input_grad[2]:
            shape, dtype = ctx.bias_shape
            wide = torch.promote_types(dy.dtype, torch.float32)
            dbias = dy.flatten(0, -2).to(wide).sum(0).view(shape).to(dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            weight = layer.decoded(dy.dtype).flatten(0, -2)
            dx = (dy.flatten(0, -2) @ weight).view(*ctx.lead, -1).to(ctx.dtype)
        return dx, None, dbias


def _scatters(layer: QuantizedLinear) -> bool:
    """Whether the product leaves each rank its own tokens."""
    shape = layer.shape
    return (
        shape.cut == "row"
        and shape.sequence_parallel
        and shape.ranks.size > 1
        and layer.scheme.activations is not None
    )


def _product(x: Tensor, layer: QuantizedLinear, bias: Tensor | None) -> Tensor:
    wanted = x.requires_grad or (bias is not None and bias.requires_grad)
    if not wanted or not torch.is_grad_enabled():  # as in generation, which is quick without
        return _computed(x, layer, bias)
    y: Tensor = _Product.apply(x, layer, bias)  # type: ignore[no-untyped-call]
    return y
