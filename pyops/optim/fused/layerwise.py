"""Optimizers that treat each layer by its norms, over separate parameters or over one flat
parameter that holds them all.

    rows of a group    | w1 | b1 | flat parameter: w2, b2, pad, w3 | ...   gathered and saved so
    layers of a launch | w1 | b1 | w2 | b2 | w3 | ...                      views without padding

A parameter is flat when it has an attribute `flat_layout` (pyops.flat.FlatBuffer.parameter does), a
FlatLayout of its elements. Its layers share its one `step`. The table of layers follows from that
of rows by one gather and one addition.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyops.flat import FlatLayout
from pyops.ops.optimizers.table import PARAM, optimizer_table
from pyops.optim.fused.fused_optimizer import FusedOptimizer
from pyops.optim.fused.input_checks import name_of
from pyops.optim.fused.launches import spread_of_work
from pyops.optim.fused.table_rows import TableRows
from pyops.protocols import ParamGroup

__all__ = ["LayerwiseOptimizer", "layers_of", "layout_of"]


def layout_of(param: Tensor) -> FlatLayout | None:
    """The layout of a flat parameter, None for any other."""
    return getattr(param, "flat_layout", None)


def layers_of(
    columns: Sequence[Sequence[Tensor]], offsets: Sequence[int]
) -> tuple[list[list[Tensor]], list[int]]:
    """Columns and offsets with a row for each layer: views, and the step of the parameter for each
    of its layers."""
    wide: list[list[Tensor]] = [[] for _ in columns]
    starts: list[int] = []
    for i, param in enumerate(columns[PARAM]):
        layout = layout_of(param)
        if layout is None:
            places: list[slice] = [slice(None)]
        else:
            places = [layout.slice_at(k) for k in range(len(layout.names))]
        for place in places:
            starts.append((offsets[i] if offsets else 0) + (place.start or 0))
            for which, (column, out) in enumerate(zip(columns, wide, strict=True)):
                if column:
                    whole = layout is None or which == len(columns) - 1 or column[i].numel() == 0
                    out.append(column[i] if whole else column[i].detach()[place])
    return wide, starts


class LayerTable(NamedTuple):
    """layers = rows[owner] + shift: the table of layers from that of rows, whose gradients may have
    moved since."""

    owner: Tensor
    shift: Tensor

    def of(self, table: Tensor) -> Tensor:
        return table.index_select(0, self.owner) + self.shift


def _layer_table(
    columns: Sequence[Sequence[Tensor]], offsets: Sequence[int], table: Tensor
) -> LayerTable | None:
    """How to make the table of layers; None when every row is one."""
    params = columns[PARAM]
    if all(layout_of(p) is None for p in params):
        return None
    # As tables of other columns would be: sizes and chunks come from one that is made of the views.
    wide, starts = layers_of(columns, offsets)
    lists: Any = [*wide, starts]
    layers = optimizer_table(*lists)
    counts = [1 if (layout := layout_of(p)) is None else len(layout.names) for p in params]
    owner = torch.repeat_interleave(
        torch.arange(len(params), device="cpu"), torch.tensor(counts, device="cpu")
    ).to(table.device)
    return LayerTable(owner, layers - table.index_select(0, owner))


class LayerwiseOptimizer(FusedOptimizer):
    """What LAMB and LARS share. A group's `trust_ratio` False leaves its parameters to the plain
    rule.

    Attributes:
        reduce_norms: Set it where each process holds a part of every layer: a callable that takes
            this process' float64 [layers, 2] squared norms of a launch and returns their sums over
            all processes; it is not pickled.
    """

    reduce_norms: Callable[[Tensor], Tensor] | None = None

    @abstractmethod
    def _layer_step(
        self,
        group: ParamGroup,
        work: Tensor | list[list[Tensor]],
        norms: Tensor,
        *device_scalars: Tensor | None,
        passes: int,
        offsets: list[int],
    ) -> None:
        """Run the passes on a table or on the lists of a batch."""

    def _check_rows(self, group: ParamGroup, indices: Iterable[int]) -> None:
        indices = list(indices)
        super()._check_rows(group, indices)
        for i in indices:
            check_layout(group["params"][i], name=name_of(group, i), who=type(self).__name__)

    def _make_table(self, columns: list[list[Tensor]], offsets: list[int]) -> Tensor:
        table = super()._make_table(columns, offsets)
        table.layers = _layer_table(columns, offsets, table)  # type: ignore[attr-defined]
        return table

    def _key(self, group: ParamGroup) -> tuple[Any, ...]:
        layouts = tuple(id(layout) for p in group["params"] if (layout := layout_of(p)) is not None)
        return (*super()._key(group), layouts)

    def _launch(
        self,
        group: ParamGroup,
        work: Tensor | TableRows,
        lr: Tensor | None,
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        layered = group["trust_ratio"]  # the plain rule needs no layers
        scalars = (lr, factor, skip)
        offsets: list[int] = []
        lists: Tensor | list[list[Tensor]]
        if isinstance(work, TableRows):
            lists, offsets = (
                layers_of(work.columns, work.offsets) if layered else (work.columns, work.offsets)
            )
            rows, device = len(lists[PARAM]), lists[PARAM][0].device
        else:
            layers: LayerTable | None = getattr(work, "layers", None)
            lists = layers.of(work) if layered and layers is not None else work
            rows, device = lists.shape[0], lists.device
        norms = torch.zeros(rows, 2, dtype=torch.float64, device=device)
        spread = spread_of_work(work)
        if (self.reduce_norms is None and spread is None) or not layered:
            return self._layer_step(group, lists, norms, *scalars, passes=3, offsets=offsets)
        self._layer_step(group, lists, norms, *scalars, passes=1, offsets=offsets)
        if spread is not None:
            norms = spread.sum_(norms)
        if self.reduce_norms is not None:
            norms = self.reduce_norms(norms).contiguous()
        return self._layer_step(group, lists, norms, *scalars, passes=2, offsets=offsets)


def check_layout(param: Tensor, *, name: str, who: str) -> None:
    """Raise ValueError for a flat_layout that is not one of the parameter's elements."""
    layout = layout_of(param)
    if layout is None:
        return
    if (
        not isinstance(layout, FlatLayout)
        or param.dim() != 1
        or not param.is_contiguous()
        or layout.numel != param.numel()
    ):
        found = f"of {layout.numel} elements" if isinstance(layout, FlatLayout) else repr(layout)
        raise ValueError(
            f"{who}: flat_layout of {name} is {found}; expected a FlatLayout of the "
            f"{param.numel()} elements of a contiguous "
            "parameter of one dimension: step a shard of a FlatBuffer without "
            "flat_layout, or give the shard its own"
        )
