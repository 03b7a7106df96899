"""The base of the fused optimizers: torch.optim.Optimizer outside, one launch per param group
inside.

    step()   check everything -> gather or reuse each group's table -> norm -> factor -> launch
             a mistake raises before anything is changed             (clip, unscale: one scalar)

Subclasses say which states a parameter has and which kernel steps a batch of rows (see adam.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from pyops.flat import check_watches, watches_of
from pyops.flat.dtensor import is_dtensor, placed_alike
from pyops.ops.library import has_kernel, native
from pyops.ops.optimizers.table import optimizer_table
from pyops.optim.fused.clip import gradient_factor
from pyops.optim.fused.input_checks import (
    DTYPES,
    check_gradient,
    check_gradients_apart,
    check_hyperparameters,
    check_numbered,
    check_parameter,
    check_settings,
    name_of,
    number,
)
from pyops.optim.fused.launches import Launch, device_of, squared_norms
from pyops.optim.fused.param_state import check_state, complete_state
from pyops.optim.fused.state_dict import Loading
from pyops.optim.fused.table_plan import TablePlan
from pyops.optim.fused.table_rows import (
    GRAD,
    PARAM,
    Row,
    TableRows,
    by_spread,
    row_of,
    split_rows,
    table_rows_of,
)
from pyops.protocols import ParamGroup

__all__ = ["FusedOptimizer"]

SETTINGS = ("master_weights", "state_dtype", "stochastic_rounding", "max_grad_norm", "zero_grad")


class FusedOptimizer(Loading, torch.optim.Optimizer):
    """What all fused optimizers share. `grad_norm`: after a step with max_grad_norm, the norm of
    all gradients, unscaled and before clipping, a float32 scalar on the device.
    `reduce_squared_norm`: set it where each process holds a part of the gradients: a callable that
    takes this process' float64 [2] (sum of squares, count of non-finite elements) and returns the
    sum over all processes; it is not pickled."""

    _step_supports_amp_scaling = True
    _table_op = ""
    _steps_dtensors = True

    def __init__(self, params: ParamsT, defaults: ParamGroup, options: Mapping[str, Any]) -> None:
        """See the subclasses; `defaults` are those of param groups, `options` of the optimizer."""
        who = type(self).__name__
        self.master_weights: bool = options["master_weights"]
        self.state_dtype: torch.dtype = options.get("state_dtype", torch.float32)
        self.stochastic_rounding: bool = options["stochastic_rounding"]
        self.max_grad_norm: float | None = options["max_grad_norm"]
        self.zeroes_gradients: bool = options["zero_grad"]
        check_settings(
            state_dtype=self.state_dtype,
            master_weights=self.master_weights,
            stochastic_rounding=self.stochastic_rounding,
            max_grad_norm=self.max_grad_norm,
            zero_grad=self.zeroes_gradients,
            who=who,
        )
        self._measured: dict[str, Tensor | None] = {
            "grad_norm": None
        }  # torch 2.11 traces no assignment to an attribute
        self.reduce_squared_norm: Callable[[Tensor], Tensor] | None = None
        self._forget()
        self._check_group(defaults)
        listed: Any = params if isinstance(params, Tensor) else list(params)
        if isinstance(listed, list) and not listed:
            raise ValueError(
                f"{who} got an empty parameter list; pass model.parameters() of a model "
                "that has some"
            )
        super().__init__(listed, defaults)

    @abstractmethod
    def _moments(self, group: ParamGroup) -> tuple[str | None, ...]:
        """Names of the states that a row has, in the order of the table's columns exp_avg,
        exp_avg_sq, max; None for a column that this group leaves empty."""

    def _make_table(self, columns: list[list[Tensor]], offsets: list[int]) -> Tensor:
        """A table of the columns: params, grads, the three of _moments, masters, copies, steps."""
        params, grads, exp_avgs, exp_avg_sqs, largest, masters, copies, steps = columns
        return optimizer_table(
            params, grads, exp_avgs, exp_avg_sqs, largest, masters, copies, steps, offsets
        )

    def _check_group(self, group: ParamGroup) -> None:
        """Raise for hyper-parameters of a group that make no sense; called before each step."""
        check_hyperparameters(group, who=type(self).__name__)

    def _complete(self, group: ParamGroup, param: Tensor, state: dict[str, Any]) -> None:
        """Add to a parameter's checked state what is missing."""
        complete_state(
            state,
            param,
            moments=[m for m in self._moments(group) if m],
            state_dtype=self.state_dtype,
            master=self._has_master(param),
        )

    def _has_master(self, param: Tensor) -> bool:
        return self.master_weights and param.dtype != torch.float32

    @abstractmethod
    def _launch(
        self,
        group: ParamGroup,
        work: Tensor | TableRows,
        lr: Tensor | None,
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """Step a table or lists of rows.

        Args:
            lr: a tensor on the device that replaces group["lr"].
            factor: what gradients are multiplied by.
            skip: the step is skipped where this number is not 0.
        """

    def _scalars(self, group: ParamGroup, lr: Tensor | None) -> ParamGroup:
        """What every op takes beside its rule's own hyper-parameters."""
        return {
            "lr": 0.0 if lr is not None else float(group["lr"]),
            "weight_decay": group["weight_decay"],
            "maximize": group["maximize"],
            "zero_grads": self.zeroes_gradients,
            "stochastic_rounding": self.stochastic_rounding,
            "seed": group["seed"],
        }

    # ----------------------------------------------------------------------------------------------
    # param groups

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group, as torch.optim does; ValueError or TypeError before anything is added."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        who, group = type(self).__name__, dict(param_group)
        params = group["params"]
        group["params"] = (
            [params]
            if isinstance(params, Tensor)
            else params
            if isinstance(params, set)
            else list(params)
        )
        if misplaced := sorted(set(SETTINGS) & set(group)):
            raise ValueError(
                f"{who}: {misplaced} belong to the whole optimizer; pass them to "
                f"{who}(...), not in a group"
            )
        self._check_group({**self.defaults, **group})
        named = [p if isinstance(p, tuple) else (None, p) for p in group["params"]]
        tensors = [p for _, p in named]
        for i, (name, param) in enumerate(named):
            if isinstance(param, Tensor):
                label = (
                    f"parameter {name!r}"
                    if name
                    else f"parameter {i} of its group (shape {tuple(param.shape)})"
                )
                check_parameter(param, name=label, who=who, dtensors=self._steps_dtensors)
        if len({id(p) for p in tensors}) != len(tensors):
            raise ValueError(
                f"{who}: a parameter appears twice in one group; pass each once, "
                "list(dict.fromkeys(params))"
            )
        for key in ("copies", "offsets"):
            if group.get(key) is not None and len(group[key]) != len(tensors):
                raise ValueError(
                    f"{who}: {key!r} has {len(group[key])} entries for {len(tensors)} "
                    "parameters; give one for each"
                )
        super().add_param_group(group)
        self._forget()

    def _forget(self) -> None:
        """Drop every plan: the next step gathers anew."""
        self._plans: dict[int, list[TablePlan]] = {}
        self._watch: Any = None
        self._flat_watches = watches_of(getattr(self, "param_groups", ()))

    def _offsets(self, group: ParamGroup) -> list[int]:
        """The number of each parameter's first element, for stochastic rounding: counted through
        all groups."""
        if group.get("offsets") is not None:
            return list(group["offsets"])
        start = 0
        for each in self.param_groups:
            sizes = [p.numel() for p in each["params"]]
            if each is group:
                return [start + before for before in accumulate([0, *sizes[:-1]])]
            start += sum(sizes)
        raise AssertionError("the group is not one of this optimizer's")

    # ----------------------------------------------------------------------------------------------
    # gathering

    def _check_rows(self, group: ParamGroup, indices: Iterable[int]) -> None:
        """Raise for anything about these parameters that can't be stepped. Nothing is changed."""
        indices = list(indices)
        if self.zeroes_gradients:
            check_gradients_apart(
                [group["params"][i].grad for i in indices], who=type(self).__name__
            )
        who, moments = type(self).__name__, [m for m in self._moments(group) if m]
        copies = group.get("copies")
        for i in indices:
            param, name = group["params"][i], name_of(group, i)
            check_parameter(param, name=name, who=who, dtensors=self._steps_dtensors)
            if self.stochastic_rounding:
                check_numbered(param, name=name, who=who)
            check_gradient(param.grad, param, name=name, who=who, zeroed=self.zeroes_gradients)
            if state := self.state.get(param):
                check_state(state, param, moments=moments, name=name, who=who)
            copy = copies[i] if copies is not None else None
            fits = copy is None or (
                copy.dtype in DTYPES and copy.device == param.device and placed_alike(copy, param)
            )
            if copy is not None and (not fits or copy.shape != param.shape):
                raise ValueError(
                    f"{who}: the copy of {name} is {tuple(copy.shape)} on {copy.device}; "
                    f"expected {param.device}"
                )

    def _gather(self, group: ParamGroup, indices: Iterable[int]) -> dict[torch.device, list[Row]]:
        """Rows of checked parameters by device, their state made or completed."""
        moments = self._moments(group)
        offsets = self._offsets(group) if self.stochastic_rounding else None
        copies, rows = group.get("copies"), defaultdict(list)
        for i in indices:
            param = group["params"][i]
            state = self.state[param]
            self._complete(group, param, state)
            columns = [param, param.grad, *(state[m] if m else None for m in moments)]
            columns += [
                state["master"] if self._has_master(param) else None,
                copies[i] if copies is not None else None,
                state["step"],
            ]
            row = row_of(i, columns, offsets[i] if offsets is not None else None)
            rows[row.device].append(row)
        return rows

    def _key(self, group: ParamGroup) -> tuple[Any, ...]:
        """What, besides tensors, decides the columns of a group's table."""
        copies, offsets = group.get("copies"), group.get("offsets")
        return (
            self._moments(group),
            self.master_weights,
            self.stochastic_rounding,
            self.zeroes_gradients,
            None if copies is None else tuple(map(id, copies)),
            None if offsets is None else tuple(offsets),
        )

    def _prepare(self) -> list[Launch]:
        """Every launch of this step. All checks come before any state is made."""
        if self._captured():
            return self._prepare_captured()
        if self._watch is not None and not self._watch.unchanged(self.state):
            self._forget()
        valid: set[int] = set()
        wanted: list[list[int]] = []
        for g, group in enumerate(self.param_groups):
            self._check_group(group)
            params, plans = group["params"], self._plans.get(g)
            if plans is not None and all(
                plan.still_holds(params, self._key(group)) for plan in plans
            ):
                valid.add(g)
                wanted.append([i for plan in plans for each in plan.leftover for i in each])
            else:
                self._plans.pop(g, None)
                wanted.append([i for i, p in enumerate(params) if p.grad is not None])
            self._check_rows(group, wanted[g])
        launches: list[Launch] = []
        for g, group in enumerate(self.param_groups):
            rows = self._gather(group, wanted[g]) if wanted[g] else {}
            if g not in valid:
                rows = self._make_plans(g, rows)
            launches += [(group, plan) for plan in self._plans.get(g, ()) if plan.table is not None]
            launches += self._batches(group, rows)
        if self._plans and (self._watch is None or len(valid) != len(self.param_groups)):
            module = native()
            self._watch = module.StateWatch(self.state) if module is not None else None
        return launches

    def _make_plans(
        self, g: int, rows: dict[torch.device, list[Row]]
    ) -> dict[torch.device, list[Row]]:
        """Plans for a group's rows, where there are kernels; returns the rows that no table
        took."""
        module, params = native(), self.param_groups[g]["params"]
        if module is None or not all(has_kernel(self._table_op, device.type) for device in rows):
            return rows
        if any(is_dtensor(p) for p in params):  # whose local gradients the scan does not see
            return rows
        plans, left = [], {}
        # A group without any gradient has a plan too: to notice the first one.
        for device, some in (rows or {torch.device("cpu"): []}).items():
            plan = TablePlan(params, some, make_table=self._make_table, native=module)
            plan.key = self._key(self.param_groups[g])
            out = {i for each in plan.leftover for i in each}
            left[device] = [row for row in some if row.place in out]
            plans.append(plan)
        self._plans[g] = plans
        return {device: some for device, some in left.items() if some}

    def _prepare_captured(self) -> list[Launch]:
        """Launches that a CUDA graph holds by value: lists of tensors, whose addresses travel as
        arguments of the kernels.

        The table of a plan would not do: a step between two replays writes other addresses into it,
        or frees it.
        """
        wanted = [
            [i for i, p in enumerate(group["params"]) if p.grad is not None]
            for group in self.param_groups
        ]
        for group, indices in zip(self.param_groups, wanted, strict=True):
            self._check_group(group)
            self._check_rows(group, indices)
        launches: list[Launch] = []
        for group, indices in zip(self.param_groups, wanted, strict=True):
            launches += self._batches(group, self._gather(group, indices))
        return launches

    def _batches(self, group: ParamGroup, rows: dict[torch.device, list[Row]]) -> list[Launch]:
        """Launches of lists of tensors, without a plan."""
        launches: list[Launch] = []
        for some in (alike for of_device in rows.values() for alike in by_spread(of_device)):
            fast, others = split_rows(some)
            each = ([fast] if fast else []) + others
            launches += [
                (group, table_rows_of(one, zero_grads=self.zeroes_gradients)) for one in each
            ]
        return launches

    def _prepare_traced(self) -> list[Launch]:
        """Launches for torch.compile: lists of tensors that it can follow, no pointers, no checks
        of memory."""
        launches: list[Launch] = []
        for group in self.param_groups:
            rows = self._gather(
                group, [i for i, p in enumerate(group["params"]) if p.grad is not None]
            )
            launches += [
                (group, table_rows_of(some, zero_grads=self.zeroes_gradients))
                for some in rows.values()
            ]
        return launches

    # ----------------------------------------------------------------------------------------------
    # stepping

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm before clipping of the last step with max_grad_norm; None before it."""
        return self._measured["grad_norm"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over every parameter that has a gradient; returns what `closure` returned,
        called with grad enabled.

        With max_grad_norm, or under a GradScaler, a step whose gradients hold an inf or a nan
        changes nothing; otherwise it spreads them, as torch.optim does. Never waits for an
        accelerator.

        Raises:
            TypeError: before anything is changed, for parameters or gradients that can't be
                stepped.
            ValueError: before anything is changed, for parameters or gradients that can't be
                stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_watches(self._flat_watches, refuse=getattr(self, "_leave", None))
        self._step()
        return loss

    def _step(self) -> None:
        compiling = torch.compiler.is_compiling()
        launches = self._prepare_traced() if compiling else self._prepare()
        first = next((p for group in self.param_groups for p in group["params"]), None)
        if first is None:  # groups that are still empty
            return
        device = first.device if not launches else device_of(launches[0][1])
        for _, work in launches:
            if isinstance(work, TableRows):
                work.load(gradients=True)
        squared = (
            [] if self.max_grad_norm is None else squared_norms(launches, self._unplanned(), device)
        )
        factor, skip, self._measured["grad_norm"] = gradient_factor(
            squared,
            max_norm=self.max_grad_norm,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            device=device,
            reduce=self.reduce_squared_norm,
        )
        for group, work in launches:
            self._run(group, work, factor, skip)

    def _unplanned(self) -> list[Tensor]:
        """The parameters of groups that have no plan, as those of DTensors."""
        return [
            p
            for g, group in enumerate(self.param_groups)
            if g not in self._plans
            for p in group["params"]
        ]

    def _run(
        self,
        group: ParamGroup,
        work: TablePlan | TableRows,
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """Launch one table or batch, copy back stand-ins, and tell autograd what was written."""
        device = device_of(work)
        lr = group["lr"]
        rate = (
            lr.reshape(()).to(device, torch.float32)
            if isinstance(lr, Tensor) and number(lr) is None
            else None
        )
        if factor is not None and factor.device != device:
            factor = factor.to(device)
        if skip is not None and skip.device != device:
            skip = skip.to(device)
        if isinstance(work, TablePlan):
            assert work.table is not None
            self._launch(group, work.table, rate, factor, skip)
            written = work.written
            if self.zeroes_gradients:
                written = written + [p.grad for p in group["params"] if p.grad is not None]
        else:
            work.load(gradients=False)
            self._launch(group, work, rate, factor, skip)
            work.store()
            written = (
                work.columns[PARAM]
                + work.columns[-2]
                + (work.columns[GRAD] if self.zeroes_gradients else [])
            )
            written = written + work.shared
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(written)

    @torch.no_grad()
    def step_parameter(self, group: int, index: int) -> None:
        """Step one parameter now, param_groups[group]["params"][index]: what fuse_into_backward
        does with each."""
        chosen = self.param_groups[group]
        self._check_group(chosen)
        self._check_rows(chosen, [index])
        for rows in self._gather(chosen, [index]).values():
            batch = table_rows_of(rows, zero_grads=self.zeroes_gradients)
            batch.load(gradients=True)
            self._run(chosen, batch, None, None)

    def _captured(self) -> bool:
        """Whether this step is being captured in a CUDA graph. RuntimeError where it was not built
        for that."""
        on_cuda = any(p.is_cuda for group in self.param_groups for p in group["params"][:1])
        if not on_cuda or not torch.cuda.is_current_stream_capturing():
            return False
        if not all(group.get("capturable", True) for group in self.param_groups):
            raise RuntimeError(
                f"step() of {type(self).__name__} is being captured in a CUDA graph, but "
                "capturable is False: build the "
                "optimizer with capturable=True, and pass lr as a tensor on the device "
                "if it is to change between replays"
            )
        return True

    def refresh_masters(self) -> None:
        """Set every master to its parameter: call it after loading weights into a model that has
        already been stepped."""
        for param, state in self.state.items():
            if "master" in state:
                state["master"].copy_(param.detach())
