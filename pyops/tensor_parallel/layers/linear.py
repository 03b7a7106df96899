"""Linear layers cut over ranks: by columns of the output, or by rows of the input, of which a pair
needs one sum.

    y = x W^T                     column: rows of W         row: columns of W
                                  rank 0  [ W_0 ] -> y_0    rank 0, 1  [ W_0 | W_1 ] (x_0, x_1) -> x_0 W_0^T + x_1 W_1^T
                                  rank 1  [ W_1 ] -> y_1

(Shoeybi et al., "Megatron-LM", 2019, section 3.) Weights lie as in torch.nn.Linear, [out, in], at
this rank's size only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.flat import Placement
from pyops.tensor_parallel.functional.initialise import initialise_
from pyops.tensor_parallel.functional.products import Plan, column_products, row_product
from pyops.tensor_parallel.functional.ranks import Ranks
from pyops.tensor_parallel.functional.regions import gather, scatter

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b, of which each rank computes its columns of y.

    x: [..., in], the same on every rank; under sequence parallelism this rank's rows [n, in] of the
    flattened tokens.
    y: [..., out / ranks]; under sequence parallelism [ranks * n, out / ranks], all tokens with the
    last ranks' padding. Where the ranks don't divide `out`, weight and bias are padded with zeros:
    every y is ceil(out / ranks) wide, and the columns beyond `out` are zero.

    unit: columns that stay together (a head's width); out_features must be a multiple of it.
    stacked: that many matrices of out_features in one weight [stacked, out / ranks, in], each cut
    for itself; y then has
        stacked * out / ranks columns, the matrices' one after the other.
    copies: that many neighbouring ranks hold the same columns, and each only a part of their
    gradient.
    gather_output: y is whole, [..., out], on every rank. skip_bias: returns (y without bias, bias
    or None).
    reduce: "fp32": the parts of dx of 16-bit inputs are computed and summed over the ranks in fp32
    and rounded once;
        "native": they are 16-bit, half the bytes. overlap: sum dx while dW is computed; the same bits either way.
    seed, name: weight is drawn from the stream (seed, name + ".weight") with deviation std; seed
    None leaves it as it is in
        memory, for a model that draws all its parameters itself. group None: one rank alone.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    placements: dict[str, Placement]
    plan: Plan

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        unit: int = 1,
        stacked: int = 0,
        copies: int = 1,
        gather_output: bool = False,
        skip_bias: bool = False,
        reduce: str = "fp32",
        overlap: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = 0,
        name: str = "",
        std: float = 0.02,
    ) -> None:
        super().__init__()
        _check_sizes(in_features, out_features)
        if stacked and gather_output:
            raise ValueError(
                "gather_output puts the ranks' columns side by side, which mixes stacked "
                "matrices; gather each yourself"
            )
        self.in_features, self.out_features, self.stacked, self.std = (
            in_features,
            out_features,
            stacked,
            std,
        )
        self.gather_output, self.skip_bias = gather_output, skip_bias
        ranks = Ranks.of(group)
        self.plan = Plan(ranks, sequence_parallel and ranks.size > 1, reduce, overlap)
        lead = (stacked,) if stacked else ()
        shapes = {
            "weight": (*lead, out_features, in_features),
            **({"bias": (*lead, out_features)} if bias else {}),
        }
        self.placements = {
            key: Placement.cut(
                shape, dim=len(lead), rank=ranks.rank, ranks=ranks.size, unit=unit, copies=copies
            )
            for key, shape in shapes.items()
        }
        _create(self, bias, device, dtype)
        if seed is not None:
            self.reset_parameters(seed=seed, name=name)

    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draw the weight anew from the stream (seed, name + ".weight"); the bias becomes zero."""
        _reset(self, seed, name, self.std)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        _check_width(x, self.in_features, self)
        (y,) = column_products(x, [self.weight], [None if self.skip_bias else self.bias], self.plan)
        if self.gather_output and self.plan.ranks.size > 1:
            y = gather(y, dim=-1, duplicated=True, group=self.plan.ranks.group)[
                ..., : self.out_features
            ]
        return (y, self.bias) if self.skip_bias else y

    def extra_repr(self) -> str:
        return _describe(self)


class RowParallelLinear(nn.Module):
    """y = x W^T + b, where each rank holds columns of x and W, and their products are summed; the
    bias is added after the sum.

    x: [..., in / ranks], as a column-parallel layer leaves it (padded where the ranks don't divide
    `in`, and then W is padded with zeros); scatter_input: x is whole, and each rank takes its part.
    y: [..., out], the same on every rank; under sequence parallelism x is [N, in / ranks] and y
    this rank's [n, out] of the N flattened tokens, padded.

    skip_bias: returns (y without bias, bias or None). Under sequence parallelism it is then added
    to a rank's own tokens only, and its gradient there is a part, as its placement says, that
    `finish_gradients` sums.

    unit: columns of x that stay together. reduce: "fp32": products of 16-bit inputs stay in fp32,
    are summed so over the ranks, get the bias and are rounded once; "native": parts are 16-bit,
    half the bytes. The rest as in ColumnParallelLinear.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    placements: dict[str, Placement]
    plan: Plan

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        unit: int = 1,
        scatter_input: bool = False,
        skip_bias: bool = False,
        reduce: str = "fp32",
        overlap: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = 0,
        name: str = "",
        std: float = 0.02,
    ) -> None:
        super().__init__()
        _check_sizes(in_features, out_features)
        self.in_features, self.out_features, self.std = in_features, out_features, std
        self.scatter_input, self.skip_bias = scatter_input, skip_bias
        ranks = Ranks.of(group)
        self.plan = Plan(ranks, sequence_parallel and ranks.size > 1, reduce, overlap)
        shape, who = (out_features, in_features), {"rank": ranks.rank, "ranks": ranks.size}
        self.placements = {"weight": Placement.cut(shape, dim=1, unit=unit, **who)}
        if bias:
            self.placements["bias"] = Placement.whole(
                (out_features,), partial=self.plan.sequence_parallel and skip_bias, **who
            )
        _create(self, bias, device, dtype)
        if seed is not None:
            self.reset_parameters(seed=seed, name=name)

    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draw the weight anew from the stream (seed, name + ".weight"); the bias becomes zero."""
        _reset(self, seed, name, self.std)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        place = self.placements["weight"]
        if self.scatter_input and self.plan.ranks.size > 1:
            _check_width(x, self.in_features, self)
            missing = place.length * self.plan.ranks.size - self.in_features
            x = scatter(nn.functional.pad(x, (0, missing)), dim=-1, group=self.plan.ranks.group)
        _check_width(x, place.length, self)
        y = row_product(x, self.weight, None if self.skip_bias else self.bias, self.plan)
        return (y, self.bias) if self.skip_bias else y

    def extra_repr(self) -> str:
        return _describe(self)


def _check_sizes(in_features: int, out_features: int) -> None:
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be 1 or more")


def _check_width(x: Tensor, width: int, layer: ColumnParallelLinear | RowParallelLinear) -> None:
    if x.shape[-1] != width:
        raise ValueError(
            f"x is {tuple(x.shape)}, but {type(layer).__name__}({layer.extra_repr()}) "
            f"takes [..., {width}] here"
        )


def _create(
    layer: ColumnParallelLinear | RowParallelLinear,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """Parameters of the sizes that the placements give, not yet filled."""
    for name, placement in layer.placements.items():
        layer.register_parameter(
            name, nn.Parameter(torch.empty(placement.local_shape, device=device, dtype=dtype))
        )
    if not bias:
        layer.register_parameter("bias", None)


def _reset(
    layer: ColumnParallelLinear | RowParallelLinear, seed: int, name: str, std: float
) -> None:
    prefix = name + "." if name else ""
    for key, placement in layer.placements.items():
        spread = 0.0 if key == "bias" else std
        initialise_(
            layer.get_parameter(key), seed=seed, name=prefix + key, std=spread, placement=placement
        )


def _describe(layer: ColumnParallelLinear | RowParallelLinear) -> str:
    ranks = layer.plan.ranks
    shared = f", rank {ranks.rank} of {ranks.size}" if ranks.size > 1 else ""
    return f"{layer.in_features}, {layer.out_features}, bias={layer.bias is not None}{shared}"
