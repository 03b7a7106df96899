"""AWQ: inputs that matter are scaled up before their weights are rounded (Lin et al.,
arXiv:2306.00978, section 3.2).

    s = mean |X_j|^r, normalized by sqrt(max s min s), r = 0, 1/20 .. 19/20
    the r with the least |Q(W s) (X / s) - W X|^2, over all layers that read the same numbers

The scale is divided out before: in the norm; in the up half of a gated MLP, of the down layer; in
the values of attention, of the output layer. What is before other layers can't be divided, and they
stay as they are.

The examples are seen once: mean |X_j| and X^T X stay, from which the errors of all r are computed,
|D X|^2 = trace(D X X^T D^T) for D = Q(W s) / s - W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyops.mesh import ALONE
from pyops.quantized.calibration.inputs import (
    Batches,
    alike,
    check_batches,
    check_model,
    run,
)
from pyops.quantized.calibration.over_ranks import gathered, summed
from pyops.quantized.calibration.readers import (
    Readers,
    fold,
    readers_of_layers,
    readers_of_norms,
)
from pyops.quantized.formats import Format, decode, encode
from pyops.quantized.layers import (
    chosen,
    input_ranks,
    inputs_of_all,
    matrix,
    output_ranks,
)
from pyops.tensor_parallel import Ranks, RanksLike

__all__ = ["awq", "awq_scale", "rounding_error"]

STEPS = 20  # values of r


@dataclass
class Moments:
    """What a layer was given: float64 sums over its tokens."""

    magnitudes: Tensor
    """[in], of |x|."""
    products: Tensor
    """[in, in], of x x^T."""
    tokens: int = 0
    """How many."""

    @classmethod
    def empty(cls, x: Tensor) -> Moments:
        """Of no tokens, for inputs such as x [tokens, in]."""
        zeros = torch.zeros(x.shape[-1], dtype=torch.float64, device=x.device)
        return cls(zeros, zeros.outer(zeros))

    def add(self, x: Tensor) -> None:
        """Tokens more.

        Args:
            x: [tokens, in].
        """
        wide = x.double()
        self.magnitudes += wide.abs().sum(0)
        self.products += wide.t() @ wide
        self.tokens += len(x)

    def reduce(self, ranks: Ranks) -> None:
        """Put together what ranks have seen. Collective."""
        count = torch.tensor([self.tokens], dtype=torch.float64, device=self.products.device)
        self.tokens = int(summed(count, ranks))
        self.magnitudes = summed(self.magnitudes, ranks)
        self.products = summed(self.products, ranks)


def awq_scale(magnitudes: Tensor, r: float) -> Tensor:
    """s [in] = mean |X|^r, normalized so that sqrt(max s min s) is 1.

    Args:
        magnitudes: [in], mean |x| of each input.
        r: 0 to 1; 0 is no scale.
    """
    s = magnitudes.clamp_min(1e-4).pow(r)
    return s / (s.max() * s.min()).sqrt()


def rounding_error(weight: Tensor, s: Tensor, products: Tensor, format: Format) -> float:
    """|Q(W s) (X / s) - W X|^2 of one layer.

    Args:
        weight: [out, in].
        s: [in].
        products: float64 [in, in], X^T X.
        format: of the weights.
    """
    scaled = weight.float() * s.float()
    error = decode(encode(scaled, format)).double() / s.double() - weight.double()
    return float((error @ products * error).sum())


@torch.no_grad()
def awq(
    model: nn.Module,
    format: Format,
    batches: Batches,
    *,
    only: Sequence[str] | None = None,
    group: RanksLike = ALONE,
) -> dict[str, float]:
    """Scale the inputs and weights of layers so that rounding the weights costs least, in place:
    the model computes what it did, to rounding. Convert it afterwards.

    Args:
        model: in evaluation mode.
        format: of the weights that it will have.
        batches: examples, what the model is called with.
        only: patterns of the names of layers; None: all linear layers but the head. A norm is
            folded into if all its readers are among them, a layer if it is, too.
        group: ranks that have examples of their own; by default this rank alone.

    Returns:
        {name of a norm, or of a layer: r}; r = 0 where no scale was better than none.

    Raises:
        ValueError: for no batches, a model in training mode, groups that do not divide a layer's
            inputs, inputs that are not finite; nothing is changed then.
    """
    ranks = Ranks.of(group)
    with alike(model, ranks):
        layers, given = chosen(model, only), check_batches(batches, "awq")
        check_model(model, layers, "awq")
    found = [*readers_of_norms(model, given[0], layers), *readers_of_layers(model, layers)]
    first = {name: layer for e in found for name, layer in list(e.layers.items())[:1]}
    moments: dict[str, Moments] = {}

    def see(name: str, x: Tensor) -> None:
        layer = layers[name]
        x = gathered(x, input_ranks(layer), dim=1)[:, : inputs_of_all(layer)]
        moments.setdefault(name, Moments.empty(x)).add(x)

    if first:
        run(model, given, first, see)
    best = {}
    for entry in found:
        own = moments[next(iter(entry.layers))]
        own.reduce(ranks)
        best[entry.name] = _best(entry, own, format)
    for entry in found:
        fold(entry, best[entry.name][1])
    return {name: r for name, (r, _) in best.items()}


def _best(readers: Readers, moments: Moments, format: Format) -> tuple[float, Tensor]:
    """The exponent with the least error of all readers, and its scale."""
    if not bool(torch.isfinite(moments.magnitudes).all()):
        raise ValueError(f"awq: the inputs of {', '.join(readers.layers)} are not all finite")
    mean = readers.shared(moments.magnitudes / max(1, moments.tokens))
    tried = [(step / STEPS, awq_scale(mean, step / STEPS).float()) for step in range(STEPS)]
    errors = torch.zeros(STEPS, dtype=torch.float64, device=moments.products.device)
    for layer in readers.layers.values():
        weight = gathered(matrix(layer), input_ranks(layer), dim=1)[:, : len(mean)]
        own = [rounding_error(weight, s, moments.products, format) for _, s in tried]
        errors += summed(torch.tensor(own).to(errors), output_ranks(layer))
    return tried[int(errors.argmin())]
