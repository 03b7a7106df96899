"""Linear layers whose input, weight and output a grid cuts, and what joins them.

x [b, ..., in / columns] --> product of blocks --> + bias --> y [b, ..., out / columns]

The bias lies with the columns of y, a copy of it with every block of rows. In three dimensions y
is cut as `behind` says: two layers, one after the other, give the cuts of x again, so that a
residual can be added. `GridSequential` and `GridResidual` check that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyops.flat import Placement
from pyops.protocols import HasPlacements
from pyops.tensor_parallel.functional.initialize import initialize_
from pyops.tensor_parallel.grids.grid import Cuts, Grid
from pyops.tensor_parallel.grids.products import product
from pyops.tensor_parallel.grids.regions import shared
from pyops.tensor_parallel.layers.layer_config import InitConfig

__all__ = ["GridLinear", "GridLinearConfig", "GridResidual", "GridSequential"]


@dataclass(frozen=True, kw_only=True)
class GridLinearConfig(InitConfig):
    """Options of GridLinear."""

    form: str = "ab"
    """Which product it is, and with it how the weight is cut. "ab": blocks of x are gathered, which
    sends fewer bytes where `in` is at most `out`; "abt": blocks of y are summed, which sends fewer
    where `out` is less. The same in three dimensions."""
    stacked: int = 0
    """Number of matrices that lie in one weight [stacked, out, in], each cut for itself; y has
    their columns one after the other. 0: one matrix [out, in]. Of the form "ab"."""
    skip_bias: bool = False
    """Return (y without the bias, the bias or None), for a caller that adds it in a fused
    operation."""
    keep_gathered: bool = False
    """Keep gathered blocks for backward, see `product`."""
    stepwise: bool = False
    """Multiply in steps of single blocks, see `product`."""


class GridLinear(nn.Module):
    """x [b, ..., in / columns] -> y [b, ..., out / columns], blocks that `cuts` and `behind` say.

    weight: this rank's part of [out, in], and bias: its part of [out], as `placements` say. Widths
    that the grid does not divide are padded with zeros.

    Args:
        in_features: in, the width of the whole x.
        out_features: out, the width of the whole y.
        grid: the ranks that share the layer.
        bias: whether there is a bias.
        config: see `GridLinearConfig`; None: its defaults.
        cuts: of x; None: those between the blocks of a model.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: a size below 1, an unknown form, cuts that the grid does not have.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    placements: dict[str, Placement]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        grid: Grid,
        bias: bool = True,
        config: GridLinearConfig | None = None,
        cuts: Cuts | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config = config or GridLinearConfig()
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be 1 or more")
        if config.form not in ("ab", "abt") or (config.stacked and config.form != "ab"):
            raise ValueError(
                f"form is {config.form!r} and stacked {config.stacked}; give 'ab', or 'abt' with "
                "stacked=0"
            )
        self.in_features, self.out_features = in_features, out_features
        self.grid, self.config, self.cuts = grid, config, cuts or grid.cuts
        self.behind = grid.behind(self.cuts)
        stacked = config.stacked
        self.placements = {
            "weight": grid.weight_place(
                out_features, in_features, self.cuts, form=config.form, stacked=stacked
            )
        }
        if bias:
            self.placements["bias"] = grid.width_place(out_features, self.behind, stacked=stacked)
        for name, place in self.placements.items():
            empty = torch.empty(place.local_shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))
        if not bias:
            self.register_parameter("bias", None)
        if config.seed is not None:
            self.reset_parameters(seed=config.seed, name=config.name)

    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draws the weight anew from the stream (seed, name + ".weight"); the bias becomes zero."""
        prefix = name + "." if name else ""
        for key, place in self.placements.items():
            std = 0.0 if key == "bias" else self.config.std
            initialize_(
                self.get_parameter(key), seed=seed, name=prefix + key, std=std, placement=place
            )

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """y; with config.skip_bias (y without the bias, this rank's part of it or None)."""
        width = self.grid.columns(self.in_features, self.cuts).length
        if x.shape[-1] != width:
            raise ValueError(
                f"x is {list(x.shape)}, but GridLinear({self.extra_repr()}) takes "
                f"[..., {width}], this rank's columns of {self.in_features}"
            )
        y = self.multiply(x, self.weight)
        bias = self.shared_bias(y.dtype)
        if self.config.skip_bias:
            return y, bias
        return y if bias is None else y + bias

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product of this rank's blocks of x and of a weight that is cut as this layer's."""
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        matrix = weight if weight.dim() == 2 else weight.flatten(0, 1)
        y = product(
            x.reshape(-1, x.shape[-1]),
            matrix.t() if self.config.form == "ab" else matrix,
            form=self.config.form,
            grid=self.grid,
            cuts=self.cuts,
            keep_gathered=self.config.keep_gathered,
            stepwise=self.config.stepwise,
        )
        return y.view(*x.shape[:-1], y.shape[-1])

    def shared_bias(self, dtype: torch.dtype) -> Tensor | None:
        """This rank's part of the bias, one-dimensional, whose gradient is summed over the ranks
        that have other rows."""
        if self.bias is None:
            return None
        return shared(self.bias.flatten().to(dtype), self.grid.line(*self.behind.rows))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.grid}"


def _check_dimensions(model: nn.Module, *, who: str) -> None:
    """ValueError where a layer within has a part of its weight as in one dimension."""
    for name, layer in model.named_modules():
        places = layer.placements if isinstance(layer, HasPlacements) else {}
        shared_out = any(p.copies > 1 or p.size != p.global_shape for p in places.values())
        if isinstance(getattr(layer, "grid", None), Grid) or not shared_out:
            continue
        raise ValueError(
            f"{who}: {name or 'it'} is a {type(layer).__name__}, which its ranks cut in one "
            "dimension and whose input is the same on all of them, while a grid cuts that too; use "
            "the layer of pyops.tensor_parallel.grids in its place"
        )


class GridSequential(nn.Sequential):
    """Layers one after the other, each of which takes what the one before it gives.

    Args:
        layers: With attributes `cuts` and `behind`; those without, such as activations, keep the
            cuts.

    Raises:
        ValueError: A layer takes other cuts than those before it give, or is one of tensor
            parallelism in one dimension.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        _check_dimensions(self, who="GridSequential")
        now: Any = None
        for number, layer in enumerate(layers):
            takes = getattr(layer, "cuts", None)
            if takes is None:
                continue
            if now is not None and takes != now:
                raise ValueError(
                    f"layer {number} takes {takes}, but what comes before gives {now}; make it "
                    f"with cuts={now!r}"
                )
            now = getattr(layer, "behind", takes)
        self.cuts = next((c for c in (getattr(i, "cuts", None) for i in layers) if c), None)
        self.behind = now


class GridResidual(nn.Module):
    """x + inner(x).

    Args:
        inner: With attributes `cuts` and `behind`.

    Raises:
        ValueError: What it gives is cut in another way than what it takes: an odd number of linear
            layers in three dimensions. Or it has a layer of tensor parallelism in one dimension.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        _check_dimensions(inner, who="GridResidual")
        takes, gives = getattr(inner, "cuts", None), getattr(inner, "behind", None)
        if takes != gives:
            raise ValueError(
                f"a residual with {takes} can't be added to what has {gives}; between the two ends "
                "of a residual a 3d grid has an even number of linear layers"
            )
        self.inner, self.cuts, self.behind = inner, takes, gives

    def forward(self, x: Tensor) -> Tensor:
        """x + inner(x), of one shape."""
        result: Tensor = x + self.inner(x)
        return result
