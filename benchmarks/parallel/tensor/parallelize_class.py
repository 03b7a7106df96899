"""One model class under `parallelize`, on one of two forked ranks: is it right, or refused and
unchanged?"""

from __future__ import annotations

import copy
import functools
import resource
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.parallel.tensor.guessed_plans import guessed
from pyops.tensor_parallel import parallelize, sync_partial_grads
from pyops.tensor_parallel.convert.check.example_inputs import examples
from pyops.tensor_parallel.convert.check.trial_run import placed
from pyops.tensor_parallel.convert.module_swap import laid_out
from pyops.tensor_parallel.convert.plans import plan_of

__all__ = ["DEFECTS", "Row", "limit_memory", "row_of", "told"]

BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-4}  # of the largest number
DEFECTS = ("WRONG", "changed", "raised", "not compared", "bench")
GUESSED = 12_000_000  # parameters, above which no plan is guessed: it would take minutes
MEMORY = 6 << 30  # bytes that a rank may map beyond what it begins with

Row = dict[str, str]
Plan = Mapping[str, str] | None
Reference = tuple[torch.dtype, dict[str, Any], list[torch.Tensor], dict[str, torch.Tensor]]


def limit_memory() -> None:
    """More than MEMORY beyond what this process has is a MemoryError, or an error of torch's."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))


def row_of(model: nn.Module, *, group: dist.ProcessGroup | None, guess: bool) -> Row:
    """{result, why} by the plan that `parallelize` has for it; {guess, guess_why} by one that is
    guessed from names."""
    reference = functools.cache(lambda: _reference(model))

    def both(plan: Plan) -> tuple[str, str]:
        result, why = _agreed(_tried(model, plan, False, reference, group), group)
        if result != "right" or "blocks" not in (plan_of(model) if plan is None else plan).values():
            return result, why
        with_sp, why_sp = _agreed(_tried(model, plan, True, reference, group), group)
        if with_sp in ("right", "refused"):
            return (
                result,
                why if with_sp == "right" else f"with sequence_parallel refused: {why_sp}",
            )
        return with_sp, f"with sequence_parallel: {why_sp}"

    result, why = both(None)
    row = {"result": result, "why": why}
    if guess:
        plan = guessed(model) if sum(p.numel() for p in model.parameters()) < GUESSED else None
        row["guess"], row["guess_why"] = both(plan) if plan else ("none", "")
    return row


def _agreed(mine: tuple[str, str], group: Any) -> tuple[str, str]:
    """What both ranks found, or the worse of the two."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    results = [result for result, _ in found]
    for pair in found:
        if pair[0] in DEFECTS:
            return pair
    return (
        found[0] if len(set(results)) == 1 else ("WRONG", f"the ranks differ: {', '.join(results)}")
    )


def _tried(
    model: nn.Module, plan: Plan, sequence_parallel: bool, reference: Callable[[], Any], group: Any
) -> tuple[str, str]:
    """(result, why) of one call of `parallelize`, on a copy."""
    cut = copy.deepcopy(model)
    before = _state(cut)
    generator = torch.get_rng_state()
    try:
        parallelize(cut, group=group, plan=plan, sequence_parallel=sequence_parallel)
    except Exception as error:
        differs = _difference(before, _state(cut))
        if differs or not torch.equal(generator, torch.get_rng_state()):
            return "changed", f"{differs or 'the generator'}: {told(error)}"
        return ("refused" if isinstance(error, ValueError) else "raised"), told(error)
    found = reference()
    return _compared(cut, found, group) if isinstance(found, tuple) else ("not compared", found)


def _state(model: nn.Module) -> dict[str, Any]:
    """Everything that a refusal must leave: modules, their attributes and hooks by identity;
    tensors by their bits."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[f"module {name}"] = (
            id(module),
            type(module),
            list(module.__dict__),
            list(module._modules),
        )
        for key, value in module.__dict__.items():
            inner = list(value.items()) if isinstance(value, dict) else value
            found[f"attribute {name}.{key}"] = (
                inner if isinstance(inner, int | float | str) else _ids(inner)
            )
        if (config := getattr(module, "config", None)) is not None:
            found[f"config {name}"] = repr(config)
    for name, value in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        found[f"tensor {name}"] = (
            id(value),
            value.requires_grad,
            value.grad,
            value.detach().clone(),
        )
    return found


def _ids(value: Any) -> Any:
    return (
        [(key, id(each)) for key, each in value]
        if isinstance(value, list) and all(_pair(v) for v in value)
        else id(value)
    )


def _pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The name of the first thing that is not what it was, or none."""
    for key in [*before, *(set(after) - set(before))]:
        a, b = before.get(key), after.get(key)
        if key.startswith("tensor") and a is not None and b is not None:
            same = a[:3] == b[:3] and _same_bits(a[3], b[3])
        else:
            same = a == b
        if not same:
            return key
    return ""


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_meta or a.is_complex():
        return a.shape == b.shape and (
            a.is_meta or torch.equal(torch.view_as_real(a), torch.view_as_real(b))
        )
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _reference(model: nn.Module) -> Reference | str:
    """Arguments, and (outputs, gradients) of the uncut model, in fp64 or else in fp32; or why it
    does not run."""
    reasons: list[Exception] = []
    for dtype in BOUNDS:
        before = copy.deepcopy(model).to(dtype)
        try:
            for _, options in examples(model, None):
                inputs = {
                    k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v
                    for k, v in options.items()
                }
                try:
                    return dtype, inputs, *_passed(before, inputs)
                except Exception as error:
                    reasons.append(error)
                    before.zero_grad()
        except ValueError as error:
            reasons.append(error)
    return f"the uncut model does not run: {told(reasons[0])}"


def _passed(model: nn.Module, inputs: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs and gradients of a sum of all of them, weighted."""
    torch.manual_seed(7)
    outputs = [each for each in _tensors(model(**inputs)) if each.is_floating_point()]
    generator = torch.Generator().manual_seed(3)
    weighted = [
        (
            torch.randn(y.shape, generator=generator, dtype=y.dtype) * y.masked_fill(y.isinf(), 0.0)
        ).sum()
        for y in outputs
        if y.requires_grad
    ]
    torch.stack(weighted).sum().backward()
    gradients = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    if any(x.isnan().any() for x in (*outputs, *gradients.values())) or not any(
        g.any() for g in gradients.values()
    ):
        raise ValueError("its outputs and gradients are not numbers, or all zero")
    return [y.detach() for y in outputs], gradients


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """All that are in mappings and sequences."""
    if torch.is_tensor(output):
        yield output
    elif isinstance(output, dict | tuple | list):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _tensors(value)


def _compared(cut: nn.Module, reference: Reference, group: Any) -> tuple[str, str]:
    """("right", "") or ("WRONG", what): outputs, and every gradient or the part of it that this
    rank has."""
    dtype, inputs, expected, expected_gradients = reference
    bound = BOUNDS[dtype]
    cut = cut.to(dtype)
    try:
        outputs, _ = _passed(cut, inputs)
        sync_partial_grads(cut, group=group)
    except Exception as error:
        return "WRONG", f"fails when run: {told(error)}"
    if len(outputs) != len(expected):
        return "WRONG", f"{len(outputs)} outputs instead of {len(expected)}"
    for y, whole in zip(outputs, expected, strict=True):
        if not _apart(y, whole) <= bound * _largest(whole):
            return "WRONG", "an output differs"
    scale = max(_largest(gradient) for gradient in expected_gradients.values())
    for key, module, place in placed(cut):
        p = cut.get_parameter(key)
        gradient = expected_gradients.get(key)
        if gradient is None:
            if p.grad is not None and p.grad.any():
                return "WRONG", f"{key} has a gradient, and had none"
            continue
        mine = gradient if place is None else place.take(laid_out(module, gradient, place))
        got = torch.zeros_like(mine) if p.grad is None else p.grad
        if not _apart(got, mine) <= bound * max(_largest(gradient), 1e-3 * scale):
            return "WRONG", f"the gradient of {key} differs"
    return "right", "" if dtype == torch.float64 else "compared in fp32"


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinities of one sign, as of masked logits, are equal."""
    if a.shape != b.shape:
        return float("inf")
    return float(torch.where(a == b, 0.0, (a - b).abs()).max()) if a.numel() else 0.0


def _largest(x: torch.Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def told(error: BaseException) -> str:
    """A line about it."""
    text = " ".join(str(error).split()).replace("|", "/")
    return (
        f"{type(error).__name__}: {text[:160]}" if not isinstance(error, ValueError) else text[:220]
    )
