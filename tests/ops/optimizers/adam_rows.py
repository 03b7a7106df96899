"""Rows for the tests of Adam: many sizes and layouts, a state in mid-run, and the oracle:
torch.optim in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyops.ops.optimizers import optim
from tests.ops.samples import ADAM_SCALARS

# Around a register, around a tile of 1024, odd ones, none at all; the last two are transposed.
SHAPES: tuple[tuple[int, ...], ...] = (
    (1,),
    (0,),
    (3,),
    (16,),
    (31,),
    (1000,),
    (2085,),
    (),
    (7, 45),
    (33, 5),
)
LISTS = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters", "copies")


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of parameter, gradient, moments, and of master and copy where there are such."""

    param: torch.dtype
    grad: torch.dtype
    moments: torch.dtype
    master: torch.dtype | None = None
    copy: torch.dtype | None = None

    def __str__(self) -> str:
        short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", None: "none"}
        return "-".join(
            short[d] for d in (self.param, self.grad, self.moments, self.master, self.copy)
        )


@dataclass
class Rows:
    """The lists of `adam_`; `steps` last."""

    lists: list[list[Tensor]]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> list[Tensor]:
        return self.lists[0]

    def clone(self) -> Rows:
        return Rows([[t.clone() for t in group] for group in self.lists], dict(self.options))

    def step(
        self, *device_scalars: Tensor | None, function: Any = optim.adam_, **changes: Any
    ) -> None:
        scalars = {**ADAM_SCALARS, "zero_grads": False, **self.options, **changes}
        function(
            *self.lists, *(*device_scalars, None, None, None)[:3], **{"offsets": [], **scalars}
        )


def make_rows(
    dtypes: Dtypes,
    device: torch.device,
    *,
    amsgrad: bool = False,
    shapes: Any = SHAPES,
    **options: Any,
) -> Rows:
    """Rows after three to five steps: moments that fit together, parameters that are not at
    zero."""
    generator = torch.Generator(device).manual_seed(1)

    def draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        t = torch.randn(shape, device=device, generator=generator)
        return (t.t().contiguous().t() if len(shape) == 2 else t).to(dtype)

    masters = [draw(s, dtypes.master or dtypes.param) for s in shapes]
    params = [m.to(dtypes.param) for m in masters] if dtypes.master else masters
    squares = [(draw(s, torch.float32).square() * 0.1 + 0.01).to(dtypes.moments) for s in shapes]
    lists = [
        params,
        [draw(s, dtypes.grad) for s in shapes],
        [draw(s, dtypes.moments) * 0.1 for s in shapes],
        squares,
        [(v * (0.5 + draw(v.shape, v.dtype).abs())).to(v.dtype) for v in squares]
        if amsgrad
        else [],
        masters if dtypes.master else [],
        [torch.zeros_like(p, dtype=dtypes.copy) for p in params] if dtypes.copy else [],
        [torch.tensor(3.0 + i % 3, device=device) for i in range(len(shapes))],
    ]
    return Rows(lists, options)


def torch_step(rows: Rows, dtype: torch.dtype, *, factor: float = 1.0) -> list[list[Tensor]]:
    """[params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs] after one step of torch.optim in `dtype`, on
    the master if any."""
    options = {**ADAM_SCALARS, **rows.options}
    params, grads, exp_avgs, exp_avg_sqs, largest, masters = (
        [t.to(dtype) for t in group] for group in rows.lists[:6]
    )
    params = masters or params
    optimizer_class = torch.optim.AdamW if options["decoupled"] else torch.optim.Adam
    optimizer = optimizer_class(
        params,
        lr=options["lr"],
        betas=(options["beta1"], options["beta2"]),
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        amsgrad=bool(largest),
        maximize=options["maximize"],
        foreach=False,
    )
    for i, p in enumerate(params):
        p.grad = grads[i] * torch.tensor(factor, dtype=dtype)
        optimizer.state[p] = {
            "step": rows.lists[7][i].clone(),
            "exp_avg": exp_avgs[i],
            "exp_avg_sq": exp_avg_sqs[i],
        }
        if largest:
            optimizer.state[p]["max_exp_avg_sq"] = largest[i]
    optimizer.step()
    return [params, exp_avgs, exp_avg_sqs, largest]
