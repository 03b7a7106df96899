"""A plan is tried before a model is cut: outputs and all gradients of a cut copy against those of
an uncut one.

    model  --> copy on the CPU, fp64, --> uncut: outputs, gradients -----.
               two blocks of a sort,                                      +--> equal, or ValueError
               values drawn anew      --> cut, on virtual ranks: the same-'    with what differs
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pyops.flat import Placement
from pyops.tensor_parallel.convert.check.example_inputs import Inputs, examples
from pyops.tensor_parallel.convert.check.trial_copy import trial_copy
from pyops.tensor_parallel.convert.check.virtual_ranks import VirtualGroup, run_virtual
from pyops.tensor_parallel.convert.module_swap import laid_out
from pyops.tensor_parallel.functional.gradients import sync_partial_grads
from pyops.tensor_parallel.functional.ranks import Ranks

__all__ = ["NOT_CHECKED", "placed", "try_plan"]

NOT_CHECKED = "pass check=False to cut it without this check"
# By dtype: how far numbers may be apart, in units of the largest, and below which part of the
# largest gradient one is noise.
_BOUNDS = {torch.float64: (1e-6, 1e-6), torch.float32: (2e-3, 1e-2)}

CutFunction = Callable[[nn.Module, Ranks], None]  # of a model and its ranks, in place


@dataclass
class _Run:
    """What came of a forward and a backward."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]  # in float32: the check's bounds are wider than its rounding
    within: dict[str, Tensor] = field(default_factory=dict)  # the first output of each module


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


def _uncut_run(uncut: nn.Module, inputs: Inputs, dtype: torch.dtype) -> _Run:
    (reference,) = run_virtual(1, lambda group: _run(uncut, inputs, dtype))
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


class _Wide(TorchFunctionMode):
    """What a model computes or makes in fp32, whatever its own dtype, is in fp64: roundings hide no
    errors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = {Tensor.float: Tensor.double, functional.grouped_mm: _grouped}.get(func, func)
        if (
            func is torch.full
            and not (kwargs or {}).get("dtype")
            and any(isinstance(a, float) for a in args)
        ):
            kwargs = {**(kwargs or {}), "dtype": torch.float64}
        found = func(
            *map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()}
        )
        made = (
            type(found) is Tensor
            and found.dtype == torch.float32
            and not getattr(func, "__name__", "_").endswith("_")
        )
        return found.double() if made else found


def _grouped(
    a: Tensor, b: Tensor, *, offs: Tensor, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """torch.nn.functional.grouped_mm of rows by expert, which has no fp64."""
    rows = torch.tensor_split(a, offs.long()[:-1].cpu())
    products = [
        each @ matrix if bias is None else each @ matrix + bias[i]
        for i, (each, matrix) in enumerate(zip(rows, b, strict=True))
    ]
    return torch.cat(products)


def _run(
    model: nn.Module, inputs: Inputs, dtype: torch.dtype, finish: Callable[[], None] = lambda: None
) -> _Run:
    """Forward and backward of a sum of all outputs, each number with a weight of its own."""
    within: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(_keep(name, within))
        for name, module in model.named_modules()
        if name
    ]
    model.requires_grad_(True)
    gradients: dict[str, Tensor] = {}
    handles += [
        p.register_post_accumulate_grad_hook(_narrow(name, gradients))
        for name, p, partial in _with_partial(model)
        if not partial
    ]
    try:
        if dtype == torch.float64:
            with _Wide():
                outputs = _named_tensors(model(*inputs[0], **inputs[1]))
        else:
            outputs = _named_tensors(model(*inputs[0], **inputs[1]))
        loss = _weighted(outputs)
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    finish()
    for name, p in model.named_parameters():
        if p.grad is not None:
            _narrow(name, gradients)(p)
    return _Run({name: each.detach() for name, each in outputs.items()}, gradients, within)


def _with_partial(model: nn.Module) -> list[tuple[str, nn.Parameter, bool]]:
    """(name, parameter, whether its gradient is a part, which is summed after backward)."""
    partial = {name: place is not None and place.partial for name, _, place in placed(model)}
    return [(name, p, partial[name]) for name, p in model.named_parameters()]


def _narrow(name: str, gradients: dict[str, Tensor]) -> Callable[[Tensor], None]:
    """Keeps a gradient with half its bytes, for as many as a model has are there at a time."""

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        found, p.grad = p.grad.float(), None
        gradients[name] = gradients[name] + found if name in gradients else found

    return hook


def _keep(name: str, within: dict[str, Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found = next(iter(_named_tensors(output).values()), None)
        if found is not None:
            within.setdefault(name, found.detach())

    return hook


def _weighted(outputs: dict[str, Tensor]) -> Tensor:
    parts = []
    for i, (name, each) in enumerate(outputs.items()):
        if each.isnan().any():
            raise ValueError(f"its output {name} is not a number")
        if each.requires_grad:
            weights = torch.randn(
                each.shape, generator=torch.Generator().manual_seed(i), dtype=each.dtype
            )
            parts.append((weights * each.masked_fill(each.isinf(), 0.0)).sum())
    if not parts:
        raise ValueError("none of its outputs is a tensor that has gradients")
    return torch.stack(parts).sum()


def _named_tensors(output: Any, name: str = "") -> dict[str, Tensor]:
    """Floating-point tensors within mappings and sequences, by their path."""
    if isinstance(output, Tensor):
        return {name or "output": output} if output.is_floating_point() else {}
    found: dict[str, Tensor] = {}
    if isinstance(output, dict):
        for key, value in output.items():
            found.update(_named_tensors(value, f"{name}.{key}" if name else str(key)))
    elif isinstance(output, tuple | list):
        for i, value in enumerate(output):
            found.update(_named_tensors(value, f"{name}[{i}]"))
    return found


def _compare(
    name: str,
    twins: list[nn.Module],
    cut: CutFunction,
    inputs: Inputs,
    reference: _Run,
    dtype: torch.dtype,
) -> str:
    """Args: twins: Of the uncut model, one for each rank, which share their parameters."""
    size = len(twins)
    silent = sum(not g.any() for g in reference.gradients.values()) + sum(
        1 for key, _ in twins[0].named_parameters() if key not in reference.gradients
    )
    entered: list[str] = []

    def body(group: VirtualGroup) -> tuple[_Run, dict[str, Any]]:
        part = twins.pop()
        cut(part, group)
        if twins:
            _unshare(part)
        handles = [
            module.register_forward_pre_hook(_note(key, entered))
            for key, module in part.named_modules()
            if key
        ]
        run = _run(
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
        worst = max(worst, _check_outputs(name, run, reference, bound))
    worst = max(worst, _check_gradients(name, found, reference, bound, least))
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


def placed(part: nn.Module) -> list[tuple[str, nn.Module | None, Placement | None]]:
    """(name, the module whose placement it has, placement) of all parameters."""
    holders: dict[int, tuple[nn.Module, Placement]] = {}
    for module in part.modules():
        for key, place in getattr(module, "placements", {}).items():
            holders.setdefault(id(module.get_parameter(key)), (module, place))
    return [(key, *holders.get(id(p), (None, None))) for key, p in part.named_parameters()]


@torch.no_grad()
def _difference(a: Tensor, b: Tensor, unit: float) -> float:
    if a.shape != b.shape:
        return math.inf
    apart = torch.where(a == b, torch.zeros((), dtype=b.dtype), a - b).abs()
    largest = float(apart.max()) if apart.numel() else 0.0
    return (
        math.inf
        if math.isnan(largest)
        else largest / unit
        if unit
        else (math.inf if largest else 0.0)
    )


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _check_outputs(name: str, run: _Run, reference: _Run, bound: float) -> float:
    worst = 0.0
    for key, expected in reference.outputs.items():
        got = run.outputs.get(key)
        apart = math.inf if got is None else _difference(got, expected, _largest(expected))
        worst = max(worst, apart)
        if apart > bound:
            inside = [
                k
                for k, x in reference.within.items()
                if k in run.within and run.within[k].shape == x.shape
            ]
            inside = [
                k
                for k in inside
                if _difference(run.within[k], reference.within[k], _largest(reference.within[k]))
                > bound
            ]
            at = f"; the first module whose output differs is {inside[0]}" if inside else ""
            how = (
                f"is {tuple(got.shape) if got is not None else 'not there'}, not "
                f"{tuple(expected.shape)}"
            )
            how = (
                how
                if got is None or got.shape != expected.shape
                else f"differs by {apart:.1e} of its largest number"
            )
            raise ValueError(
                f"the plan does not fit {name}: the cut model's output {key} {how}{at}"
            )
    return worst


def _check_gradients(
    name: str, found: list[tuple[_Run, dict[str, Any]]], reference: _Run, bound: float, least: float
) -> float:
    scale = max(map(_largest, reference.gradients.values()), default=0.0)
    if not scale:
        raise ValueError(
            f"the example inputs give {name} no gradient, so they check nothing; pass "
            "other example_inputs="
        )
    worst = 0.0
    wrong: dict[str, float] = {}
    for run, placed in found:
        for key, (module, place) in placed.items():
            got, expected = run.gradients.get(key), reference.gradients.get(key)
            if expected is None:
                apart = 0.0 if got is None or not got.any() else math.inf
            else:
                unit = max(_largest(expected), least * scale)
                if place is not None:
                    expected = place.take(laid_out(module, expected, place))
                apart = _difference(
                    torch.zeros_like(expected) if got is None else got, expected, unit
                )
            worst = max(worst, apart)
            if apart > bound:
                wrong[key] = max(apart, wrong.get(key, 0.0))
    if wrong:
        raise ValueError(_told(name, wrong, found, reference, bound))
    return worst


def _told(
    name: str,
    wrong: dict[str, float],
    found: list[tuple[_Run, dict[str, Any]]],
    reference: _Run,
    bound: float,
) -> str:
    """The message about gradients that differ: which, by how much, and whether the ranks' are
    parts."""
    first = next(iter(wrong))
    more = f", and those of {len(wrong) - 1} more" if len(wrong) > 1 else ""
    apart = f"differs by {wrong[first]:.1e} of its largest number"
    text = f"the plan does not fit {name}: the cut model's gradient of {first}{more} {apart}"
    parts = []
    for key in wrong:
        grads = [run.gradients.get(key) for run, _ in found]
        expected = reference.gradients.get(key)
        if expected is None or any(g is None or g.shape != expected.shape for g in grads):
            continue
        together = torch.stack([g for g in grads if g is not None]).sum(0)
        if (
            all(placed[key][1] is None for _, placed in found)
            and _difference(together, expected, _largest(expected)) <= bound
        ):
            parts.append(key)
    if parts:
        modules = ", ".join(dict.fromkeys(key.rpartition(".")[0] for key in parts[:4]))
        text += (
            f"; each rank has only a part of that of {parts[0]}: make its module 'partial' "
            f"in the plan ({modules})"
        )
    return text
