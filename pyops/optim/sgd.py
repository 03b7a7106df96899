"""SGD: torch.optim.SGD's signature and numbers, in one launch per param group.

    SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)      20 bytes per parameter
                                                                      12 without momentum

The formula is that of pyops/ops/optimizers/sgd.py: Sutskever et al., ICML 2013, section 2, as torch
has it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from pyops.ops.optimizers.sgd import sgd_, sgd_from_table_
from pyops.optim.fused.fused_optimizer import FusedOptimizer
from pyops.optim.fused.options import SGDOptions, chosen_options, shows_options
from pyops.optim.fused.table_rows import TableRows
from pyops.protocols import ParamGroup

__all__ = ["SGD"]


class SGD(FusedOptimizer):
    """torch.optim.SGD, fused: momentum, dampening, Nesterov, L2 weight decay.

    All arguments of torch.optim.SGD have its meaning, by position and by keyword.

    Args:
        params: parameters, (name, parameter) pairs, or param groups.
        lr: learning rate; a tensor may change between replays of a CUDA graph.
        momentum: decay rate of the momentum buffer; 0 keeps none.
        dampening: the gradient's weight in the buffer is 1 - dampening.
        weight_decay: L2 coefficient.
        nesterov: step along gradient + momentum * buffer.
        **options: see SGDOptions.

    State: `momentum_buffer` when momentum is not 0, of state_dtype, and `step`, which counts since
    the buffer began. Param groups and errors: see Adam.
    """

    _table_op = "sgd_from_table_"

    @shows_options(SGDOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[SGDOptions],
    ) -> None:
        chosen = chosen_options(self, SGDOptions, options)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": chosen["maximize"],
            "foreach": chosen["foreach"],
            "differentiable": chosen["differentiable"],
            "fused": chosen["fused"],
            "seed": chosen["seed"],
        }
        super().__init__(params, defaults, chosen)

    def _check_group(self, group: ParamGroup) -> None:
        super()._check_group(group)
        momentum, dampening = group["momentum"], group["dampening"]
        if group["nesterov"] and (momentum == 0 or dampening != 0):
            raise ValueError(
                f"{type(self).__name__}: nesterov=True needs momentum > 0 and dampening "
                f"= 0, got momentum={momentum} and "
                f"dampening={dampening}"
            )

    def _moments(self, group: ParamGroup) -> tuple[str | None, ...]:
        return "momentum_buffer" if group["momentum"] != 0 else None, None, None

    def _complete(self, group: ParamGroup, param: Tensor, state: dict[str, Any]) -> None:
        """A buffer that is new takes the whole first gradient; one of torch, which counts no steps,
        has had its first."""
        if group["momentum"] != 0:
            if state.get("momentum_buffer") is None:
                state.pop("momentum_buffer", None)
                state["step"] = 0.0
            else:
                state.setdefault("step", 1.0)
        super()._complete(group, param, state)

    def _launch(
        self,
        group: ParamGroup,
        work: Tensor | TableRows,
        lr: Tensor | None,
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        scalars = self._scalars(group, lr) | {
            "momentum": group["momentum"],
            "dampening": group["dampening"],
            "nesterov": group["nesterov"],
        }
        if isinstance(work, Tensor):
            sgd_from_table_(work, lr, factor, skip, **scalars)
        else:
            params, grads, buffers, _, _, masters, copies, steps = work.columns
            sgd_(
                params,
                grads,
                buffers,
                masters,
                copies,
                steps,
                lr,
                factor,
                skip,
                **scalars,
                offsets=work.offsets,
            )
