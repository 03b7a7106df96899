"""Linear layers cut over ranks: by columns of the output, or by rows of the input, of which a pair
needs one sum.

    y = x W^T     column: rows of W          row: columns of W
                  rank 0  [ W_0 ] -> y_0     [ W_0 | W_1 ]  (x_0, x_1) -> x_0 W_0^T + x_1 W_1^T
                  rank 1  [ W_1 ] -> y_1     rank 0  rank 1

(Shoeybi et al., "Megatron-LM", 2019, section 3.) Weights lie as in torch.nn.Linear, [out, in], at
this rank's size only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor, nn

from pyops.flat import Placement
from pyops.ops.decoding.prepared import PreparedProduct, prepared_linear
from pyops.tensor_parallel.functional.dropout import Dropout
from pyops.tensor_parallel.functional.initialize import initialize_
from pyops.tensor_parallel.functional.keywords import refuse_keywords
from pyops.tensor_parallel.functional.low_rank_product import low_rank_product
from pyops.tensor_parallel.functional.products import (
    ProductPlan,
    autocast_together,
    column_products,
    row_product,
)
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike
from pyops.tensor_parallel.functional.regions import gather, scatter
from pyops.tensor_parallel.layers.layer_config import ColumnConfig, LinearConfig, RowConfig
from pyops.tensor_parallel.layers.low_rank import LowRank, PartDropout

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "column_outputs"]


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b, of which each rank computes its columns of y.

    x is [..., in], the same on every rank, and y [..., out / ranks]. Under sequence parallelism x
    is this rank's rows [n, in] of the flattened tokens, and y [ranks * n, out / ranks], all tokens
    with the padding of the last ranks. Where the ranks do not divide `out`, weight and bias are
    padded with zeros: every y is ceil(out / ranks) wide, and the columns beyond `out` are zero.

    Args:
        in_features: in, the width of x.
        out_features: out, the width of y over all ranks; a multiple of config.unit.
        bias: whether there is a bias.
        config: see `ColumnConfig`; None: its defaults.
        group: the ranks that share the layer, see `RanksLike`; None: the default process group.
        sequence_parallel: whether tokens are cut over the ranks outside of the layer.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: a size below 1, or that config.unit does not divide; stacked matrices whose
            output is to be gathered.
        TypeError: `group` is no group that this rank is in.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    placements: dict[str, Placement]
    plan: ProductPlan
    adapter: LowRank | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        config: ColumnConfig | None = None,
        group: RanksLike = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **moved: NoReturn,
    ) -> None:
        super().__init__()
        if moved:
            refuse_keywords("ColumnParallelLinear", moved, ColumnConfig)
        config = config or ColumnConfig()
        _check_sizes(in_features, out_features)
        if config.stacked and config.gather_output:
            raise ValueError(
                "gather_output puts the ranks' columns side by side, which mixes stacked "
                "matrices; gather each yourself"
            )
        self.in_features, self.out_features = in_features, out_features
        self.stacked, self.std = config.stacked, config.std
        self.gather_output, self.skip_bias = config.gather_output, config.skip_bias
        self.plan = _plan(config, group, sequence_parallel)
        ranks = self.plan.ranks
        lead = (config.stacked,) if config.stacked else ()
        shapes = {
            "weight": (*lead, out_features, in_features),
            **({"bias": (*lead, out_features)} if bias else {}),
        }
        self.placements = {
            key: Placement.cut(
                shape,
                dim=len(lead),
                rank=ranks.rank,
                ranks=ranks.size,
                unit=config.unit,
                copies=config.copies,
            )
            for key, shape in shapes.items()
        }
        _create(self, bias, device, dtype)
        if config.seed is not None:
            self.reset_parameters(seed=config.seed, name=config.name)

    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draws the weight anew from the stream (seed, name + ".weight"); the bias becomes zero."""
        _reset(self, seed, name, self.std)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """y; with config.skip_bias (y without the bias, the bias or None)."""
        _check_width(x, self.in_features, self)
        (y,) = column_outputs(x, [self])
        if self.gather_output and self.plan.ranks.size > 1:
            y = gather(y, dim=-1, duplicated=True, group=self.plan.ranks)[..., : self.out_features]
        return (y, self.bias) if self.skip_bias else y

    def token_product(self) -> PreparedProduct | None:
        """x [rows, in] -> [rows, out], the bias added, for few rows without gradients: its operands
        are checked here and not at each call. None where ranks share the layer, or an adapter adds
        to it."""
        return _token_product(self)

    def low_rank_places(self, rank: int) -> dict[str, Placement]:
        """What this rank holds of the factors A and B of an adapter of so many rows."""
        weight, ranks = self.placements["weight"], self.plan.ranks
        return {
            "A": Placement.whole(
                (rank, self.in_features), rank=ranks.rank, ranks=ranks.size, partial=True
            ),
            "B": replace(weight, global_shape=(*weight.global_shape[:-1], rank)),
        }

    def low_rank_dropout(self, p: float) -> Dropout:
        """Dropout of x before A."""
        return Dropout(
            p,
            width=self.in_features,
            group=self.plan.ranks,
            sequence_parallel=self.plan.sequence_parallel,
        )

    def extra_repr(self) -> str:
        return _describe(self)


class RowParallelLinear(nn.Module):
    """y = x W^T + b, where each rank holds columns of x and W, and the ranks' products are summed.

    x is [..., in / ranks], as a column-parallel layer gives it (padded where the ranks do not
    divide `in`), and y [..., out], the same on every rank. Under sequence parallelism x is of all N
    tokens, [N, in / ranks], and y this rank's rows [n, out]. The bias is added after the sum. With
    config.skip_bias under sequence parallelism it is added by the caller to this rank's tokens
    only, so its gradient is a part there, as its placement says, that `sync_partial_grads` sums.

    Args:
        in_features: in, the width of x over all ranks; a multiple of config.unit.
        out_features: out, the width of y.
        bias: whether there is a bias.
        config: see `RowConfig`; None: its defaults.
        group: the ranks that share the layer, see `RanksLike`; None: the default process group.
        sequence_parallel: whether tokens are cut over the ranks outside of the layer.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: a size below 1, or that config.unit does not divide.
        TypeError: `group` is no group that this rank is in.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    placements: dict[str, Placement]
    plan: ProductPlan
    adapter: LowRank | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        config: RowConfig | None = None,
        group: RanksLike = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **moved: NoReturn,
    ) -> None:
        super().__init__()
        if moved:
            refuse_keywords("RowParallelLinear", moved, RowConfig)
        config = config or RowConfig()
        _check_sizes(in_features, out_features)
        self.in_features, self.out_features, self.std = in_features, out_features, config.std
        self.scatter_input, self.skip_bias = config.scatter_input, config.skip_bias
        self.plan = _plan(config, group, sequence_parallel)
        ranks = self.plan.ranks
        shape, here = (out_features, in_features), {"rank": ranks.rank, "ranks": ranks.size}
        self.placements = {"weight": Placement.cut(shape, dim=1, unit=config.unit, **here)}
        if bias:
            self.placements["bias"] = Placement.whole(
                (out_features,), partial=self.plan.sequence_parallel and config.skip_bias, **here
            )
        _create(self, bias, device, dtype)
        if config.seed is not None:
            self.reset_parameters(seed=config.seed, name=config.name)

    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draws the weight anew from the stream (seed, name + ".weight"); the bias becomes zero."""
        _reset(self, seed, name, self.std)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """y; with config.skip_bias (y without the bias, the bias or None)."""
        if self.scatter_input and self.plan.ranks.size > 1:
            _check_width(x, self.in_features, self)
            place = self.placements["weight"]
            missing = place.length * self.plan.ranks.size - self.in_features
            x = scatter(nn.functional.pad(x, (0, missing)), dim=-1, group=self.plan.ranks)
        _check_width(x, self.placements["weight"].local_shape[-1], self)
        if _is_fused(self):
            y = _fused_product(x, self)
            return (y, self.bias) if self.skip_bias else y
        more, adapter = None, self.adapter
        if adapter is not None and adapter.enabled:
            more = (adapter.scale * adapter.down(x), adapter.factor("B", x))
        bias = None if self.skip_bias else self.bias
        y = row_product(x, self.weight, bias, self.plan, more=more)
        return (y, self.bias) if self.skip_bias else y

    def token_product(self) -> PreparedProduct | None:
        """x [rows, in] -> [rows, out], the bias added, for few rows without gradients: its operands
        are checked here and not at each call. None where ranks share the layer, or an adapter adds
        to it."""
        return _token_product(self)

    def low_rank_places(self, rank: int) -> dict[str, Placement]:
        """What this rank holds of the factors A and B of an adapter of so many rows."""
        weight, ranks = self.placements["weight"], self.plan.ranks
        return {
            "A": replace(weight, global_shape=(rank, self.in_features)),
            "B": Placement.whole(
                (self.out_features, rank), rank=ranks.rank, ranks=ranks.size, partial=True
            ),
        }

    def low_rank_dropout(self, p: float) -> Dropout:
        """Dropout of x before A."""
        return PartDropout(p, width=self.in_features, start=self.placements["weight"].start)

    def extra_repr(self) -> str:
        return _describe(self)


def column_outputs(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> list[Tensor]:
    """What layers of the same ranks make of the same x, with their adapters: one gather of x and
    one sum of its gradient for all.

    Args:
        x: As the layers take it.
        layers: Cut by columns.
    """
    if not all(isinstance(layer, ColumnParallelLinear) for layer in layers):
        return [layer(x) for layer in layers]  # what stands in their place, such as codes
    if all(map(_is_fused, layers)):
        return [_fused_product(x, layer) for layer in layers]
    plan, count = layers[0].plan, len(layers)
    adapters = [a if a is not None and a.enabled else None for a in (i.adapter for i in layers)]
    beside = [a for a in adapters if a is not None and not a.drops]
    biases = [None if layer.skip_bias else layer.bias for layer in layers]
    found = column_products(
        x,
        [*(layer.weight for layer in layers), *(a.factor("A", x) for a in beside)],
        [*biases, *[None] * len(beside)],
        plan,
    )
    ys, hidden = list(found[:count]), iter(found[count:])
    for i, adapter in enumerate(adapters):
        if adapter is None:
            continue
        if adapter.drops:
            (h,) = column_products(adapter.inputs(x), [adapter.factor("A", x)], [None], plan)
        else:
            h = next(hidden)
        ys[i] = adapter.add(ys[i], h)
    return ys


def _is_fused(layer: ColumnParallelLinear | RowParallelLinear) -> bool:
    """Whether one Function computes a layer and its adapter: of one rank, the adapter alone is
    trained, and sees what the layer does."""
    adapter = layer.adapter
    frozen = not any(p.requires_grad for p in (layer.weight, layer.bias) if p is not None)
    return (
        adapter is not None
        and adapter.enabled
        and not adapter.drops
        and frozen
        and layer.plan.ranks.size == 1
    )


def _fused_product(x: Tensor, layer: ColumnParallelLinear | RowParallelLinear) -> Tensor:
    adapter, weight = layer.adapter, layer.weight.flatten(0, -2)
    assert adapter is not None
    bias = None if layer.skip_bias or layer.bias is None else layer.bias.flatten()
    x, weight, bias, *factors = autocast_together(
        x, weight, bias, *(adapter.factor(name, x) for name in "AB")
    )
    return low_rank_product(x, weight, bias, (factors[0], factors[1]), scale=adapter.scale)


def _token_product(
    layer: ColumnParallelLinear | RowParallelLinear,
) -> PreparedProduct | None:
    adapter = layer.adapter
    if layer.plan.ranks.size > 1 or (adapter is not None and adapter.enabled):
        return None
    bias = None if layer.bias is None else layer.bias.detach().flatten()
    return prepared_linear(layer.weight.detach().flatten(0, -2), bias)


def _plan(config: LinearConfig, group: RanksLike, sequence_parallel: bool) -> ProductPlan:
    ranks = Ranks.of(group)
    return ProductPlan(ranks, sequence_parallel and ranks.size > 1, config.reduce, config.overlap)


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
    layer.register_module("adapter", None)


def _reset(
    layer: ColumnParallelLinear | RowParallelLinear, seed: int, name: str, std: float
) -> None:
    prefix = name + "." if name else ""
    for key, placement in layer.placements.items():
        deviation = 0.0 if key == "bias" else std
        initialize_(
            layer.get_parameter(key),
            seed=seed,
            name=prefix + key,
            std=deviation,
            placement=placement,
        )


def _describe(layer: ColumnParallelLinear | RowParallelLinear) -> str:
    ranks = layer.plan.ranks
    shared = f", rank {ranks.rank} of {ranks.size}" if ranks.size > 1 else ""
    return f"{layer.in_features}, {layer.out_features}, bias={layer.bias is not None}{shared}"
