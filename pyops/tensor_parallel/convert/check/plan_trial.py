"""A plan is tried before a model is cut: outputs and all gradients of a cut copy against those of
an uncut one.

    model  --> copy on the CPU, fp64, --> uncut: outputs, gradients -----.
               two blocks of a sort,                                      +--> equal, or ValueError
               values drawn anew      --> cut, on virtual ranks: the same-'    with what differs
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyops.tensor_parallel.convert.check.example_inputs import Inputs, examples
from pyops.tensor_parallel.convert.check.trial_comparison import check_gradients, check_outputs
from pyops.tensor_parallel.convert.check.trial_copy import trial_copy
from pyops.tensor_parallel.convert.check.trial_run import TrialRun, placed, run_trial
from pyops.tensor_parallel.convert.check.virtual_ranks import VirtualGroup, run_virtual
from pyops.tensor_parallel.functional.gradients import sync_partial_grads
from pyops.tensor_parallel.functional.ranks import Ranks

__all__ = ["NOT_CHECKED", "try_plan"]

NOT_CHECKED = "pass check=False to cut it without this check"
# By dtype: how far numbers may be apart, in units of the largest, and below which part of the
# largest gradient one is noise.
_BOUNDS = {torch.float64: (1e-6, 1e-6), torch.float32: (2e-3, 1e-2)}

CutFunction = Callable[[nn.Module, Ranks], None]  # of a model and its ranks, in place


def try_plan(
    model: nn.Module, cut: CutFunction, size: int, *, blocks: list[str], given: Any = None
) -> str:
    """What was found equal, in words. Communicates nothing.

    Args:
        cut: Does to a copy, with a virtual group, what is planned for the model.
        size: Of the group.
        blocks: Lists of which alike modules need be tried once. ValueError: something differs, or
            it can't be tried.
    """
    with torch.device("cpu"):  # whatever the default device is
        return _try_plan(model, cut, size, blocks=blocks, given=given)


def _try_plan(
    model: nn.Module, cut: CutFunction, size: int, *, blocks: list[str], given: Any
) -> str:
    name = type(model).__name__
    if any(buffer.is_meta for buffer in model.buffers()):
        return "nothing: the model's buffers are on the meta device, where nothing can be computed"
    reasons: list[str] = []
    for dtype in _BOUNDS:
        for drop in (True, False) if blocks else (False,):
            try:
                whole = trial_copy(model, dtype, blocks if drop else [])
            except (
                MemoryError,
                RuntimeError,
                TypeError,
                NotImplementedError,
                AttributeError,
            ) as error:
                reasons.append(f"no copy can be made ({type(error).__name__}: {error})")
                continue
            for inputs in examples(model, given):
                try:
                    reference = _uncut_run(_twin(whole), _cast(inputs, dtype), dtype)
                except Exception as error:
                    reasons.append(f"{type(error).__name__}: {error}")
                    whole.zero_grad()
                    continue
                twins = [_twin(whole) for _ in range(size)]
                del whole  # what is cut goes as soon as the last twin is cut
                return _compare(name, twins, cut, _cast(inputs, dtype), reference, dtype)
    raise ValueError(
        f"the plan is checked by running {name} before it is cut, and that failed: "
        f"{_short(reasons[0])}; pass other "
        f"example_inputs= (a mapping of arguments' names), or {NOT_CHECKED}"
    )


def _uncut_run(uncut: nn.Module, inputs: Inputs, dtype: torch.dtype) -> TrialRun:
    (reference,) = run_virtual(1, lambda group: run_trial(uncut, inputs, dtype))
    return reference


def _twin(model: nn.Module) -> nn.Module:
    """A copy with the same parameters: what a forward does to its own modules and buffers is not
    done to the model."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def _short(text: str) -> str:
    return text if len(text) < 600 else text[:600] + " [cut here]"


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(
                "cpu", dtype if value.is_floating_point() else value.dtype, copy=True
            )
        return value

    return tuple(map(of, inputs[0])), {key: of(value) for key, value in inputs[1].items()}


def _compare(
    name: str,
    twins: list[nn.Module],
    cut: CutFunction,
    inputs: Inputs,
    reference: TrialRun,
    dtype: torch.dtype,
) -> str:
    """Args: twins: Of the uncut model, one for each rank, which share their parameters."""
    size = len(twins)
    silent = sum(not g.any() for g in reference.gradients.values()) + sum(
        1 for key, _ in twins[0].named_parameters() if key not in reference.gradients
    )
    entered: list[str] = []

    def body(group: VirtualGroup) -> tuple[TrialRun, dict[str, Any]]:
        part = twins.pop()
        cut(part, group)
        if twins:
            _unshare(part)
        handles = [
            module.register_forward_pre_hook(_note(key, entered))
            for key, module in part.named_modules()
            if key
        ]
        run = run_trial(
            part,
            _cast(inputs, dtype),
            dtype,
            lambda: sync_partial_grads(part, group=group),
        )
        for handle in handles:
            handle.remove()
        return run, {key: (module, placement) for key, module, placement in placed(part)}

    try:
        found = run_virtual(size, body)
    except Exception as error:
        where = f" in {entered[-1]}" if entered else ""
        raise ValueError(
            f"the plan does not fit {name}, which fails{where} when cut over {size} "
            f"ranks: {type(error).__name__}: "
            f"{_short(str(error))}"
        ) from error
    bound, least = _BOUNDS[dtype]
    worst = 0.0
    for run, _ in found:
        worst = max(worst, check_outputs(name, run, reference, bound))
    worst = max(worst, check_gradients(name, found, reference, bound, least))
    return (
        f"{len(reference.outputs)} outputs and {len(reference.gradients)} gradients of "
        f"{size} ranks, equal to those of the "
        f"uncut model to {worst:.0e}"
        + (f"; {silent} parameters take no part in the example" if silent else "")
    )


def _unshare(part: nn.Module) -> None:
    """Give what was not cut memory of its own, one parameter for all names that it has."""
    own: dict[int, nn.Parameter] = {}
    for module in part.modules():
        for key, p in module._parameters.items():
            if p is not None:
                if id(p) not in own:
                    own[id(p)] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
                module._parameters[key] = own[id(p)]


def _note(name: str, entered: list[str]) -> Callable[..., None]:
    return lambda module, args: entered.append(name)
