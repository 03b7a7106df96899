"""Adafactor: torch.optim.Adafactor's signature and numbers, in one call per param group.

    Adafactor(model.parameters(), lr=1e-2)         a matrix [r, c] has a state of r + c numbers
    Adafactor([FlatBuffer(model.named_parameters()).parameter])     each tensor of it for itself
    ZeroOptimizer(model, Adafactor, ZeroConfig(stage=2))   parts of tensors: parts.py

The formula is that of pyops/ops/optimizers/adafactor.py. Shazeer and Stern, arXiv:1804.04235,
algorithms 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from pyops.flat.dtensor import first_element, is_dtensor, local_of, spread_of
from pyops.ops.optimizers.adafactor import adafactor_
from pyops.optim.adafactor.parts import PartRow, TensorPart, part_of, step_parts
from pyops.optim.fused.fused_optimizer import FusedOptimizer
from pyops.optim.fused.input_checks import check_hyperparameters, name_of
from pyops.optim.fused.layerwise import check_layout, layers_of, layout_of
from pyops.optim.fused.options import AdafactorOptions, chosen_options, shows_options
from pyops.optim.fused.param_state import check_placed
from pyops.optim.fused.table_rows import GRAD, PARAM, Row, TableRows
from pyops.protocols import ParamGroup

__all__ = ["Adafactor"]

MASTER, COPY = 5, 6  # of a batch's columns
STATES = ("row_var", "col_var", "variance")


def shapes_of(shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Shapes of row_var, col_var and variance for a tensor of this shape; (0,) for one that it does
    not have."""
    if len(shape) > 1:
        return (*shape[:-1], 1), (*shape[:-2], 1, shape[-1]), (0,)
    return (0,), (0,), tuple(shape)


def state_shapes(param: Tensor) -> dict[str, tuple[int, ...]]:
    """Shapes of a parameter's states. A flat parameter has those of its layers one after the other;
    a part has row_var and col_var of its whole tensor."""
    if (part := part_of(param)) is not None:
        row_var, col_var, _ = shapes_of(part.shape)
        return (
            {"row_var": row_var, "col_var": col_var}
            if part.is_factored
            else {"variance": tuple(param.shape)}
        )
    layout = layout_of(param)
    if layout is None:
        has = STATES[:2] if param.dim() > 1 else STATES[2:]
        return {
            name: shape
            for name, shape in zip(STATES, shapes_of(param.shape), strict=True)
            if name in has
        }
    each = [shapes_of(shape) for shape in layout.shapes]
    return {name: (sum(prod(shapes[k]) for shapes in each),) for k, name in enumerate(STATES)}


class Adafactor(FusedOptimizer):
    """torch.optim.Adafactor, fused; it never waits for an accelerator.

    All arguments of torch.optim.Adafactor have its meaning, by position and by keyword. States are
    float32, whatever the parameter's dtype. A parameter with a `flat_layout` (FlatBuffer.parameter)
    is stepped tensor by tensor, with the bits that separate parameters would have; its padding is
    not touched.

    Args:
        params: parameters, (name, parameter) pairs, or param groups.
        lr: bound of the relative step size, which is 1 / sqrt(step) below it.
        beta2_decay: exponent c of the second moment's weight, step^c.
        eps: least root of the second moment (None: eps of the dtype that is stepped), and least
            root mean square of a parameter.
        d: bound of the update's root mean square.
        weight_decay: weights are multiplied by 1 - lr * weight_decay in each step.
        **options: see AdafactorOptions.

    Param groups and errors: see Adam.

    Attributes:
        reduce_sums: set it where each process holds a part of every tensor, as parameters with an
            attribute `part_of`: a callable that replaces a float64 tensor by its sum over all
            processes, in place. It is not pickled.
        whole_states: names of the states that every process holds whole of such a parameter.
    """

    reduce_sums: Callable[[Tensor], Tensor] | None = None
    whole_states = ("row_var", "col_var")

    @shows_options(AdafactorOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        **options: Unpack[AdafactorOptions],
    ) -> None:
        chosen = chosen_options(self, AdafactorOptions, options)
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "foreach": chosen["foreach"],
            "maximize": chosen["maximize"],
            "capturable": chosen["capturable"],
            "seed": chosen["seed"],
        }
        super().__init__(params, defaults, chosen)

    def _check_group(self, group: ParamGroup) -> None:
        who, eps = type(self).__name__, group["eps"]
        check_hyperparameters(
            {**group, "eps": 0.0, "differentiable": False, "fused": False}, who=who
        )
        if not isinstance(eps, tuple | list) or len(eps) != 2:
            raise TypeError(
                f"{who}: eps={eps!r} must be two numbers, the first of which may be "
                "None, such as (None, 1e-3)"
            )
        named = {
            "eps[0]": eps[0],
            "eps[1]": eps[1],
            "d": group["d"],
            "beta2_decay": group["beta2_decay"],
        }
        for key, value in named.items():
            if value is None and key == "eps[0]":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(
                    f"{who}: {key}={value!r} must be a number, got a {type(value).__name__}"
                )
            least = {"d": 1.0, "beta2_decay": -math.inf}.get(key, 0.0)
            if not (value >= least and math.isfinite(value)):
                raise ValueError(f"{who}: {key}={value} must be a finite number >= {least:g}")
        if group["beta2_decay"] > 0:
            raise ValueError(
                f"{who}: beta2_decay={group['beta2_decay']} must be <= 0, such as -0.8"
            )

    def _moments(self, group: ParamGroup) -> tuple[str | None, ...]:
        return None, None, None  # states have shapes of their own and are no columns

    def _check_rows(self, group: ParamGroup, indices: Iterable[int]) -> None:
        indices = list(indices)
        super()._check_rows(group, indices)
        for i in indices:
            param, name, who = group["params"][i], name_of(group, i), type(self).__name__
            check_layout(param, name=name, who=who)
            if spread_of(param) is not None and first_element(param) is None:
                raise ValueError(
                    f"{who}: {name} is a DTensor placed {tuple(param.placements)}; row "
                    "and column means are taken of "
                    "contiguous shards along the first dimension, Shard(0), as "
                    "fully_shard makes them; use AdamW for it"
                )
            for key, shape in state_shapes(param).items():
                value = self.state.get(param, {}).get(key)
                if value is not None and tuple(value.shape) != shape:
                    raise ValueError(
                        f"{who}: state {key!r} of {name} is {tuple(value.shape)}; "
                        f"expected a tensor of {shape}"
                    )
                if value is not None and key == "variance":
                    check_placed(value, param, what=f"state {key!r} of {name}", who=who)

    def _complete(self, group: ParamGroup, param: Tensor, state: dict[str, Any]) -> None:
        super()._complete(group, param, state)
        for key, shape in state_shapes(param).items():
            value = state.get(key)
            if value is None and key == "variance" and is_dtensor(param):
                state[key] = torch.zeros_like(param, dtype=torch.float32)
            elif value is None:
                state[key] = torch.zeros(shape, dtype=torch.float32, device=param.device)
            elif (
                value.dtype != torch.float32
                or value.device != param.device
                or not value.is_contiguous()
            ):
                state[key] = value.to(
                    param.device, torch.float32, memory_format=torch.contiguous_format
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for param, entries in self.state.items():
            if not isinstance(param, Tensor):  # of a parameter that this optimizer has not
                continue
            for name in set(STATES) - state_shapes(param).keys():
                # Checkpoints of pyops 0.1 have empty tensors for the states that a vector has not;
                # torch's have no such keys.
                if isinstance(entries.get(name), Tensor) and entries[name].numel() == 0:
                    del entries[name]

    def _make_plans(
        self, g: int, rows: dict[torch.device, list[Row]]
    ) -> dict[torch.device, list[Row]]:
        return rows  # the op takes lists: matrices need their shapes

    def _launch(
        self,
        group: ParamGroup,
        work: Tensor | TableRows,
        lr: Tensor | None,
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        assert isinstance(work, TableRows)
        if work.spread is not None or part_of(work.columns[PARAM][0]) is not None:
            return self._launch_parts(group, work, lr, factor, skip)
        dense, changed = self._contiguous(work.columns)
        columns, offsets = layers_of(dense, work.offsets)
        shapes, states = self._layers(work.columns[-1])
        params, grads, masters, copies = (
            [
                t.view(shape) if t.numel() else t
                for t, shape in zip(columns[which], shapes, strict=True)
            ]
            if columns[which]
            else []
            for which in (PARAM, GRAD, MASTER, COPY)
        )
        eps1, eps2 = group["eps"]
        adafactor_(
            params,
            grads,
            states["row_var"],
            states["col_var"],
            states["variance"],
            masters,
            copies,
            columns[-1],
            lr,
            factor,
            skip,
            **self._scalars(group, lr),
            beta2_decay=float(group["beta2_decay"]),
            eps1=-1.0 if eps1 is None else float(eps1),
            eps2=float(eps2),
            d=float(group["d"]),
            offsets=offsets,
        )
        for tensor, stand_in in changed:
            tensor.copy_(stand_in)

    def _launch_parts(
        self,
        group: ParamGroup,
        work: TableRows,
        lr: Tensor | None,
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """Step parts of tensors together with the other processes."""
        if skip is not None and bool(skip):
            return
        owner = {id(state["step"]): param for param, state in self.state.items() if "step" in state}
        rows, columns = [], work.columns
        for i, step in enumerate(columns[-1]):
            param = owner[id(step)]
            part = part_of(param) or TensorPart(tuple(param.shape), first_element(param) or 0)
            master, copy = (self._given(columns[which], i) for which in (MASTER, COPY))
            master, copy = (None if t is None else t.view(-1) for t in (master, copy))
            tensors = (
                columns[PARAM][i].detach().view(-1),
                columns[GRAD][i].view(-1),
                master,
                copy,
                step,
            )
            state = {key: local_of(value) for key, value in self.state[param].items()}
            rows.append(PartRow(part, *tensors, state=state, offset=work.offsets[i]))
        step_parts(
            rows,
            reduce=self._reduce_of(work),
            group=group,
            lr=float(group["lr"] if lr is None else lr),
            factor=factor,
            zero_grads=self.zeroes_gradients,
            stochastic_rounding=self.stochastic_rounding,
        )

    def _reduce_of(self, work: TableRows) -> Callable[[Tensor], Tensor]:
        if work.spread is not None:
            return work.spread.sum_
        return self.reduce_sums or (lambda sums: sums)

    @staticmethod
    def _given(column: list[Tensor], i: int) -> Tensor | None:
        return column[i] if column and column[i].numel() else None

    def _contiguous(
        self, columns: list[list[Tensor]]
    ) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
        """The columns with contiguous stand-ins where needed, and what is to be copied back:
        (tensor, stand-in)."""
        columns, changed = list(columns), []
        for which in (PARAM, GRAD, MASTER, COPY):
            dense = [t if t.is_contiguous() else t.contiguous() for t in columns[which]]
            if which != GRAD or self.zeroes_gradients:
                changed += [
                    (t, c) for t, c in zip(columns[which], dense, strict=True) if t is not c
                ]
            columns[which] = dense
        return columns, changed

    def _layers(
        self, steps: Sequence[Tensor]
    ) -> tuple[list[tuple[int, ...]], dict[str, list[Tensor]]]:
        """Shapes and states of all layers of the parameters that have these steps."""
        owner = {id(state["step"]): param for param, state in self.state.items() if "step" in state}
        shapes: list[tuple[int, ...]] = []
        states: dict[str, list[Tensor]] = {name: [] for name in STATES}
        for step in steps:
            param = owner[id(step)]
            layout = layout_of(param)
            of_param = [tuple(param.shape)] if layout is None else list(layout.shapes)
            shapes += of_param
            for k, name in enumerate(STATES):
                whole, start = local_of(self.state[param].get(name, self._none(param))), 0
                for shape in of_param:
                    end = start + prod(shapes_of(shape)[k])
                    states[name].append(whole.view(-1)[start:end])
                    start = end
        return shapes, states

    @staticmethod
    def _none(param: Tensor) -> Tensor:
        return torch.empty(0, device=param.device)
