"""SmoothQuant: outliers of activations move into the weights, which can bear them (Xiao et al.,
arXiv:2211.10438, equation 4).

    s_j = max |X_j|^a / max |W_:j|^(1 - a)         x_j / s_j in the norm before, W_:j s_j

One s for all layers that read a norm (queries, keys and values; gate and up): they share their
input. Layers that read no norm stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pyops.given_numbers import check_number
from pyops.mesh import ALONE
from pyops.quantized.calibration.inputs import Batches, alike, check_batches, check_model
from pyops.quantized.calibration.over_ranks import greatest
from pyops.quantized.calibration.readers import (
    Readers,
    fold,
    largest_inputs,
    readers_of_norms,
)
from pyops.quantized.layers import chosen, matrix, output_ranks
from pyops.tensor_parallel import Ranks, RanksLike

__all__ = ["smooth", "smoothing_scale"]

SMALLEST = 1e-5


def smoothing_scale(inputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """s [in]: max |X|^alpha / max |W|^(1 - alpha); 1 where either is 0.

    Args:
        inputs: [in], the largest |x| of each input.
        weights: [in], the largest |w| of each input's column.
        alpha: how much moves: 0 none of the inputs' range, 1 all of it.
    """
    s = inputs.pow(alpha) / weights.pow(1 - alpha)
    return torch.where((inputs > 0) & (weights > 0), s.clamp_min(SMALLEST), 1.0)


@torch.no_grad()
def smooth(
    model: nn.Module,
    batches: Batches,
    *,
    alpha: float = 0.5,
    only: Sequence[str] | None = None,
    group: RanksLike = ALONE,
) -> dict[str, Tensor]:
    """Move outliers of the inputs into the weights, in place: the model computes what it did, to
    rounding, and its inputs have less far ends. Convert it afterwards.

    Args:
        model: in evaluation mode.
        batches: examples, what the model is called with.
        alpha: see `smoothing_scale`.
        only: patterns of the names of layers; None: all linear layers but the head. A norm is
            folded into if all its readers are among them.
        group: ranks that have examples of their own; by default this rank alone.

    Returns:
        {name of a norm: s}, for each norm that was folded into.

    Raises:
        ValueError: for no batches, a model in training mode, an alpha that is not 0 to 1, inputs or
            weights that are not finite; nothing is changed then.
    """
    ranks = Ranks.of(group)
    with alike(model, ranks):
        check_number("alpha", alpha, lambda v: 0 <= v <= 1, "it is 0 to 1")
        layers, given = chosen(model, only), check_batches(batches, "smooth")
        check_model(model, layers, "smooth")
    found = readers_of_norms(model, given[0], layers)
    readers = {name: layer for entry in found for name, layer in entry.layers.items()}
    if not readers:
        return {}
    seen = largest_inputs(model, given, readers)
    scales = {}
    for entry in found:
        first = next(iter(entry.layers))
        inputs = greatest(seen[first], ranks)
        weights = largest_weights(entry)
        s = smoothing_scale(inputs, weights, alpha)
        if not bool(torch.isfinite(inputs + weights + s).all()):
            raise ValueError(
                f"smooth: the inputs or weights of {', '.join(entry.layers)} are not all finite"
            )
        scales[entry.name] = s
    for entry in found:
        fold(entry, scales[entry.name])
    return scales


def largest_weights(readers: Readers) -> Tensor:
    """fp32 [in]: the largest |w| of each column of all the readers' weights, over all ranks.

    Args:
        readers: a norm and its readers.
    """
    columns = [
        greatest(matrix(layer).float().abs().amax(0), output_ranks(layer))
        for layer in readers.layers.values()
    ]
    return torch.stack(columns).amax(0)
