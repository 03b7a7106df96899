"""What each layer of a CoAtNet takes, measured: its first blocks have the activations, its last the
parameters, and no formula of sizes says how long either runs."""

from __future__ import annotations

from torch import Tensor, nn

from pyops.mesh import ALONE, ProcessGroupLike
from pyops.pipeline import profile

__all__ = ["measured_costs"]


def measured_costs(
    layers: list[nn.Module],
    images_BCHW: Tensor,
    *,
    rounds: int = 5,
    group: ProcessGroupLike = ALONE,
) -> tuple[float, ...]:
    """Seconds of forward and backward of each layer, by which a pipeline evens out its stages:
    `pyops.pipeline.balance(costs, num_stages=...)`, or `LayeredModel(costs=...)`.

    Args:
        layers: `CoAtNet.layers()`.
        images_BCHW: A micro-batch.
        rounds: Of which the median is taken.
        group: The ranks that measure at the same time, each with all layers, and get the same; by
            default this process alone.

    Returns:
        A number for each of `layers`.
    """
    found = profile(layers, images_BCHW, rounds=rounds, group=group)
    return tuple(layer.forward + layer.backward for layer in found.layers)
