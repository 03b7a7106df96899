"""The step that quantizes: linear layers become codes, after training or with it in mind."""

from __future__ import annotations

from torch import Tensor

from pyops.compress.methods.work import Facts, Work
from pyops.compress.steps import QuantizeStep
from pyops.compress.text import Batch
from pyops.quantized import Int4, Int8, Scheme, aware, convert

__all__ = ["quantize", "scheme_of"]


def scheme_of(step: QuantizeStep) -> Scheme:
    """What weights and inputs become.

    Args:
        step: The options.
    """
    weights = Int8() if step.weights == "int8" else Int4(group=step.group or None)
    return Scheme(weights, Int8(per=step.activations) if step.activations else None)


def quantize(work: Work, step: QuantizeStep) -> Facts:
    """The linear layers of the model become codes.

    Args:
        work: Whose masks go; what is pruned has code 0.
        step: The options.
    """
    model, scheme, only = work.model, scheme_of(step), list(step.only) or None
    facts: Facts = {}
    if step.num_steps:
        model.requires_grad_(True)

        def loss(batch: Batch) -> Tensor:
            found: Tensor = model.loss(*batch)
            return found

        with aware(model, scheme, only=only, steps=step.num_steps) as training:
            facts |= work.learn(step, loss)
            report = training.convert()
    else:
        batches = work.texts.to_calibrate() if step.calibrates else None
        report = convert(model, scheme, only=only, method=step.algorithm, batches=batches)
    work.release_masks()
    errors = [layer.error for layer in report.layers]
    return {**facts, "layers": len(errors), "largest_error": max(errors)}
