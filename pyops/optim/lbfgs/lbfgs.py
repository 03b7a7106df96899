"""LBFGS: torch.optim.LBFGS's arguments and iterates, from one matrix of inner products.

    optimizer = LBFGS(model.parameters(), history_size=10)
    loss = optimizer.step(closure)           # closure() computes the loss and its gradients

Liu and Nocedal, Mathematical Programming 45 (1989); the two loops on coefficients: history.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from pyops.flat.dtensor import is_dtensor
from pyops.optim.lbfgs.history import History
from pyops.optim.lbfgs.line_search import strong_wolfe
from pyops.torch_private import disable_dynamo

__all__ = ["LBFGS"]

TENSORS = ("rows", "products", "direction")
SAME_POINT = 1e-4  # relative: by which two evaluations at one point may differ


class LBFGS(torch.optim.Optimizer):
    """Limited-memory BFGS over all parameters as one vector.

    Iterates are those of torch.optim.LBFGS, to rounding, where both keep the same pairs: a pair is
    kept here where its curvature s.y is more than 1e-10 |s| |y|, while torch's bound is 1e-10
    whatever their lengths. One pass over the history gives all inner products that an iteration
    needs, and one the direction: 4 history_size + 3 vectors are read in place of 10 history_size
    moves one after the other.

    Args:
        params: parameters of float32 or float64, all of one dtype and device, in one group.
        lr: length of a step without a line search; with one, that of its first trial.
        max_iter: iterations of a `step`.
        max_eval: evaluations of the closure in a `step`; None: max_iter * 1.25.
        tolerance_grad: a `step` ends where no component of the gradient is larger.
        tolerance_change: a `step` ends where neither a parameter nor the loss changes more.
        history_size: pairs of steps and differences of gradients that are kept: memory of
            2 history_size + 4 times the parameters. 10 by default, 100 in torch.
        line_search_fn: "strong_wolfe", the default here, or None for steps of length lr.

    Raises:
        ValueError: values out of range; more than one group; in the first `step`, a closure whose
            loss differs between two calls at the same point, as dropout makes it.
        TypeError: parameters of another kind.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 10,
        line_search_fn: str | None = "strong_wolfe",
    ) -> None:
        options = {
            "lr": lr,
            "max_iter": max_iter,
            "max_eval": max_iter * 5 // 4 if max_eval is None else max_eval,
            "tolerance_grad": tolerance_grad,
            "tolerance_change": tolerance_change,
            "history_size": history_size,
            "line_search_fn": line_search_fn,
        }
        _check_options(options)
        super().__init__(params, options)
        if len(self.param_groups) > 1:
            raise ValueError(
                f"LBFGS takes one param group, got {len(self.param_groups)}: its direction is of "
                "all parameters together; give the parameters as one list"
            )
        self._params: list[nn.Parameter] = self.param_groups[0]["params"]
        _check_params(self._params)

    # --- vectors

    def _history(self) -> History:
        """The history over the tensors in the state, which it shares."""
        state, like = self.state[self._params[0]], self._params[0]
        size = self.param_groups[0]["history_size"]
        numel = sum(p.numel() for p in self._params)
        history = History(numel, size=size, dtype=like.dtype, device=like.device)
        if "rows" in state:
            history.rows, history.products = state["rows"], state["products"]
            history.pairs = list(state["pairs"])
        return history

    def _gradient(self) -> Tensor:
        """All gradients as one vector; zeros where there is none."""
        return torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad.detach()).reshape(-1)
                for p in self._params
            ]
        )

    def _point(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self._params])

    def _go_to(self, point: Tensor) -> None:
        parts = point.split([p.numel() for p in self._params])
        for parameter, part in zip(self._params, parts, strict=True):
            parameter.copy_(part.view(parameter.shape))

    # --- stepping

    @torch.no_grad()
    @disable_dynamo
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Up to max_iter iterations; returns what the closure returned at the first point.

        A loss or gradient that is not finite at the first point changes nothing.

        Args:
            closure: clears the gradients, computes the loss, calls backward and returns the loss;
                called with grad enabled, at every trial point.
        """
        evaluate = torch.enable_grad()(closure)
        state, group = self.state[self._params[0]], self.param_groups[0]
        state.setdefault("func_evals", 0)
        state.setdefault("n_iter", 0)
        result = evaluate()
        loss, gradient = float(result), self._gradient()
        if not state["n_iter"]:
            self._check_closure(loss, float(evaluate()))
        state["func_evals"] += 1
        largest = float(gradient.abs().max())
        if not (math.isfinite(loss) and math.isfinite(largest)):
            return result
        if largest <= group["tolerance_grad"]:
            return result
        history, evaluations = self._history(), 1
        for iteration in range(1, group["max_iter"] + 1):
            state["n_iter"] += 1
            direction, step = self._direction(history, gradient)
            slope = _dot(gradient, direction)
            state |= {"direction": direction, "step": step, "pairs": list(history.pairs)}
            if slope > -group["tolerance_change"]:
                state["step"] = 0.0
                break
            last = iteration == group["max_iter"]
            before = loss
            budget = group["max_eval"] - evaluations
            if group["line_search_fn"] is None:
                self._go_to(self._point().add_(direction, alpha=step))
                if last:
                    break
                loss, gradient, used = float(evaluate()), self._gradient(), 1
            else:
                loss, gradient, step, used = self._searched(
                    evaluate, (loss, gradient, slope), direction, step, budget
                )
            state["step"] = step
            evaluations += used
            state["func_evals"] += used
            moved = step * float(direction.abs().max())
            if (
                last
                or evaluations >= group["max_eval"]
                or float(gradient.abs().max()) <= group["tolerance_grad"]
                or moved <= group["tolerance_change"]
                or abs(loss - before) < group["tolerance_change"]
            ):
                break
        state |= {"rows": history.rows, "products": history.products}
        return result

    def _direction(self, history: History, gradient: Tensor) -> tuple[Tensor, float]:
        """(the direction from this gradient, the first step length along it)."""
        state, lr = self.state[self._params[0]], float(self.param_groups[0]["lr"])
        if "direction" not in state:
            history.begin(gradient)
            return gradient.neg(), min(1.0, 1.0 / float(gradient.abs().sum())) * lr
        history.add(state["direction"] * state["step"], gradient)
        return history.direction(), lr

    def _searched(
        self,
        evaluate: Callable[[], Any],
        start: tuple[float, Tensor, float],
        direction: Tensor,
        first: float,
        budget: int,
    ) -> tuple[float, Tensor, float, int]:
        """(loss, gradient, step length, evaluations) of a line search, at whose end the parameters
        are."""
        loss, gradient, slope = start
        point = self._point()
        search = strong_wolfe(
            loss,
            slope,
            first=first,
            largest=float(direction.abs().max()),
            trials=budget,
            tolerance_change=self.param_groups[0]["tolerance_change"],
        )
        known = {0.0: (loss, gradient)}
        used, trial = 0, next(search)
        while True:
            self._go_to(torch.add(point, direction, alpha=trial.step))
            found = float(evaluate()), self._gradient()
            used += 1
            known = {t: at for t, at in known.items() if t in trial.held or t == 0.0}
            known[trial.step] = found
            try:
                trial = search.send((found[0], _dot(found[1], direction)))
            except StopIteration as end:
                step = float(end.value)
                break
        self._go_to(torch.add(point, direction, alpha=step))
        return *known[step], step, used

    def _check_closure(self, first: float, second: float) -> None:
        if not abs(first - second) <= SAME_POINT * abs(first) and math.isfinite(first):
            raise ValueError(
                f"LBFGS: the closure gave {first} and then {second} at the same parameters; its "
                "loss must be a function of them alone within a step: call model.eval() or set "
                "dropout to 0, and use the same samples until the step ends"
            )

    # --- states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` gave: to go on bit for bit.

        Raises:
            ValueError: for the state of other parameters, or of another history_size.
        """
        found = state_dict["state"].get(0, {})
        numel = sum(p.numel() for p in self._params)
        count = 2 * (state_dict["param_groups"][0]["history_size"] + 1) + 1
        if "rows" in found and tuple(found["rows"].shape) != (count, numel):
            raise ValueError(
                f"LBFGS: the state's history has shape {tuple(found['rows'].shape)}, and "
                f"{(count, numel)} is expected for {numel} parameters; load the state of the same "
                "model"
            )
        super().load_state_dict(state_dict)
        own = self.state[self._params[0]]
        for key in TENSORS:  # torch casts states to the parameters' dtype, products too
            if key in found:
                device = torch.device("cpu") if key == "products" else self._params[0].device
                own[key] = deepcopy(found[key]).to(device)


def _dot(a: Tensor, b: Tensor) -> float:
    return float(a.double() @ b.double())


def _check_options(options: dict[str, Any]) -> None:
    for key in ("max_iter", "max_eval", "history_size"):
        value = options[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{key} is {value!r}; give a whole number, 1 or more")
        if value < 1:
            raise ValueError(f"{key} is {value}; give a whole number, 1 or more")
    if not options["lr"] > 0:
        raise ValueError(f"lr is {options['lr']}; give more than 0, such as 1")
    for key in ("tolerance_grad", "tolerance_change"):
        if not options[key] >= 0:
            raise ValueError(f"{key} is {options[key]}; give 0 or more")
    if options["line_search_fn"] not in (None, "strong_wolfe"):
        raise ValueError(
            f"line_search_fn is {options['line_search_fn']!r}; give 'strong_wolfe', or None for "
            "steps of length lr"
        )


def _check_params(params: list[nn.Parameter]) -> None:
    first = params[0]
    for place, parameter in enumerate(params):
        if is_dtensor(parameter):
            raise TypeError(f"LBFGS: parameter {place} is a DTensor; expected whole tensors")
        if parameter.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"LBFGS: parameter {place} is {parameter.dtype}, in which differences of gradients "
                "are lost; use float32 or float64"
            )
        if (parameter.dtype, parameter.device) != (first.dtype, first.device):
            raise ValueError(
                f"LBFGS: parameter {place} is {parameter.dtype} on {parameter.device}, the first "
                f"{first.dtype} on {first.device}; all form one vector: give them one dtype and "
                "device"
            )
