"""The three products of matrices that a grid cuts, A B, A B^T and A^T B: each one's gradients are
the other two.

                                               gathered, then summed
                                               2d and 2.5d          3d, cuts (w, p), q
    "ab"   A B    A rows, B weight -> rows     A column, B row      A p, B w; sum q
    "abt"  A B^T  A rows, B weight -> rows     B row; sum column    A p, B w; sum q
    "atb"  A^T B  A rows, B rows   -> weight   A column; sum row    A p, B q; sum w

A matrix of rows is an activation, cut as `Cuts` say; one of a weight [in, out] is cut as
`Grid.weight_place` says. In 3d a result of rows has the cuts `Grid.behind`. In 2.5d the result of a
weight is summed over the layers of the grid, too: without it each layer would have the gradient of
its own rows alone.

The parts are kept for backward and not what was gathered of them, so that a rank holds 1 / p of
both operands; they are gathered again there, and while the first of the two products is computed
what the second one needs is on its way. `keep_gathered` keeps it instead.

Partial sums of 16-bit matrices leave the product in fp32, travel so, and are rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyops.comm.collectives.transport import Pending
from pyops.tensor_parallel.grids.grid import Cuts, Grid
from pyops.tensor_parallel.grids.line import joined
from pyops.tensor_parallel.grids.steps import stepwise_product

__all__ = ["FORMS", "product"]

FORMS = ("ab", "abt", "atb")
Step = tuple[str, int]  # (axis, dimension of the matrix)
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Steps:
    """What is gathered before a product and summed behind it."""

    left: Step | None
    right: Step | None
    result: Step | None
    copies: tuple[str, ...] = ()


def product(
    a: Tensor,
    b: Tensor,
    *,
    form: str,
    grid: Grid,
    cuts: Cuts | None = None,
    keep_gathered: bool = False,
    stepwise: bool = False,
) -> Tensor:
    """This rank's block of A B, A B^T or A^T B, with gradients.

    Args:
        a: This rank's block of A, two-dimensional, padded with zeros to `Grid.unit`.
        b: This rank's block of B.
        form: "ab", "abt" or "atb", see the module.
        grid: The ranks.
        cuts: Of A, a matrix of rows; None: those between blocks.
        keep_gathered: Keep what was gathered for backward: it costs the memory of a row and a
            column of blocks, and saves gathering them again.
        stepwise: In q steps of blocks, the next ones sent while two are multiplied (SUMMA), which
            need the memory of two more blocks, in place of whole rows of blocks; 2d and 2.5d of
            q x q.

    Raises:
        ValueError: Another form, cuts that the grid does not have, matrices that do not fit
            together, or a grid that has no steps; on every rank, dtypes that differ between ranks.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; choose one of {', '.join(FORMS)}")
    cuts = cuts or grid.cuts
    grid.check(cuts)
    if a.dim() != 2 or b.dim() != 2 or a.dtype != b.dtype:
        raise ValueError(
            f"a product takes two matrices of one dtype; got {a.dtype} {list(a.shape)} and "
            f"{b.dtype} {list(b.shape)}"
        )
    if stepwise and (not grid.flat or grid.axes["row"] != grid.axes["column"]):
        raise ValueError(f"stepwise products are of 2d and 2.5d grids of q x q, not of {grid}")
    grid.check_dtype(a)
    found: Tensor = _Product.apply(a, b, form, cuts, grid, keep_gathered, stepwise)  # type: ignore[no-untyped-call]
    return found


def _steps(form: str, grid: Grid, cuts: Cuts) -> _Steps:
    if not grid.flat:
        p, q = cuts.rows[1], cuts.columns
        if form == "atb":
            return _Steps((p, 0), (q, 0), ("weight", 0))
        return _Steps((p, 0), ("weight", 0), (q, 0))
    if form == "ab":
        return _Steps(("column", 1), ("row", 0), None)
    if form == "abt":
        return _Steps(None, ("row", 0), ("column", 1))
    return _Steps(("column", 1), None, ("row", 0), tuple(a for a in ("depth",) if a in grid.axes))


class _Operand:
    """A block, and what is gathered of it along lines, each once."""

    def __init__(
        self, block: Tensor, grid: Grid, gathered: Mapping[Step, Tensor] | None = None
    ) -> None:
        self.block, self.grid = block, grid
        self.gathered: dict[Step, Tensor] = dict(gathered or {})
        self._coming: dict[Step, tuple[Tensor, Pending]] = {}

    def start(self, step: Step | None) -> None:
        """Send the block along a line and begin to receive the others' blocks."""
        if step is None or step in self.gathered or step in self._coming:
            return
        line = self.grid.line(step[0])
        if line.size == 1:
            self.gathered[step] = self.block
        else:
            self._coming[step] = line.start_gather(self.block)

    def get(self, step: Step | None) -> Tensor:
        """The blocks of a line together; the block alone where there is no step."""
        if step is None:
            return self.block
        self.start(step)
        if step in self._coming:
            rows, pending = self._coming.pop(step)
            pending.wait()
            self.gathered[step] = joined(rows, step[1])
        return self.gathered[step]


def _multiply(form: str, a: _Operand, b: _Operand, grid: Grid, cuts: Cuts) -> Tensor:
    steps = _steps(form, grid, cuts)
    a.start(steps.left)
    b.start(steps.right)
    left, right = a.get(steps.left), b.get(steps.right)
    left = left.t() if form == "atb" else left
    right = right.t() if form == "abt" else right
    summed = () if steps.result is None else (steps.result[0],)
    if grid.count((*summed, *steps.copies)) == 1:
        return left @ right
    part = _part_of_sum(left, right)
    if steps.result is not None:
        part = grid.line(steps.result[0]).reduce_scatter(part, dim=steps.result[1])
    if steps.copies:
        part = grid.line(*steps.copies).sum(part)
    return part.to(left.dtype)


def _part_of_sum(a: Tensor, b: Tensor) -> Tensor:
    """a b, in the dtype in which it is summed over ranks."""
    if a.dtype not in _SIXTEEN_BITS:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        form: str,
        cuts: Cuts,
        grid: Grid,
        keep_gathered: bool,
        stepwise: bool,
    ) -> Tensor:
        ctx.form, ctx.cuts, ctx.grid, ctx.stepwise = form, cuts, grid, stepwise
        ctx.kept = keep_gathered and not stepwise
        if stepwise:
            ctx.save_for_backward(a, b)
            return _stepwise(form, _Operand(a, grid), _Operand(b, grid), grid)
        left, right = _Operand(a, grid), _Operand(b, grid)
        y = _multiply(form, left, right, grid, cuts)
        if ctx.kept:
            steps = _steps(form, grid, cuts)
            ctx.save_for_backward(a, b, left.get(steps.left), right.get(steps.right))
        else:
            ctx.save_for_backward(a, b)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        a, b, *kept = ctx.saved_tensors
        grid, cuts = ctx.grid, ctx.cuts
        gathered: list[dict[Step, Tensor]] = [{}, {}]
        if kept:
            steps = _steps(ctx.form, grid, cuts)
            for found, step, tensor in zip(gathered, (steps.left, steps.right), kept, strict=True):
                if step is not None:
                    found[step] = tensor
        A, B, D = _Operand(a, grid, gathered[0]), _Operand(b, grid, gathered[1]), _Operand(dy, grid)
        behind = grid.behind(cuts)
        for_a, for_b = {
            "ab": (("abt", D, B, behind), ("atb", A, D, cuts)),
            "abt": (("ab", D, B, behind), ("atb", D, A, behind)),
            "atb": (("abt", B, D, behind), ("ab", A, D, cuts)),
        }[ctx.form]
        wanted = [
            each if needed else None
            for each, needed in zip((for_a, for_b), ctx.needs_input_grad, strict=False)
        ]
        if ctx.stepwise:
            stepped = [None if w is None else _stepwise(*w[:3], grid) for w in wanted]
            return *stepped, None, None, None, None, None
        for w in wanted:
            if w is not None:
                steps = _steps(w[0], grid, w[3])
                w[1].start(steps.left)
                w[2].start(steps.right)
        gradients = [None if w is None else _multiply(w[0], w[1], w[2], grid, w[3]) for w in wanted]
        return *gradients, None, None, None, None, None


def _stepwise(form: str, a: _Operand, b: _Operand, grid: Grid) -> Tensor:
    y = stepwise_product(form, a.block, b.block, grid=grid)
    if form == "atb" and "depth" in grid.axes:
        return grid.line("depth").sum(y)
    return y
