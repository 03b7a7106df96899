"""check_outputs and check_gradients: the runs of a cut model's ranks against the run of the uncut
model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyops.tensor_parallel.convert.check.trial_run import TrialRun
from pyops.tensor_parallel.convert.module_swap import laid_out

__all__ = ["check_gradients", "check_outputs"]


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


def check_outputs(name: str, run: TrialRun, reference: TrialRun, bound: float) -> float:
    """How far a rank's outputs are at most from those of the uncut model, in units of the largest
    number of each.

    Args:
        name: Of the model, for the message.
        run: Of a rank of the cut model.
        reference: Of the uncut model.
        bound: How far they may be.

    Raises:
        ValueError: An output is farther, naming it and the first module whose output is.
    """
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


def check_gradients(
    name: str,
    found: list[tuple[TrialRun, dict[str, Any]]],
    reference: TrialRun,
    bound: float,
    least: float,
) -> float:
    """How far gradients of the ranks are at most from those of the uncut model, in units of the
    largest number of each.

    Args:
        name: Of the model, for the message.
        found: For each rank its run, and (module, placement) of all its parameters by name.
        reference: Of the uncut model.
        bound: How far they may be.
        least: Below which part of the largest gradient of all one is noise.

    Raises:
        ValueError: Gradients are farther, or the uncut model has none.
    """
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
    found: list[tuple[TrialRun, dict[str, Any]]],
    reference: TrialRun,
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
