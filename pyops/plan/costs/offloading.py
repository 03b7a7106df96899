"""Optimizer states in host memory: what travels between the device and the host, and how fast the
host steps.

    device --gradients--> host: master weights, moments --parameters--> device        by tiles,
                                                                             beside one another
"""

from __future__ import annotations

from pyops.plan.costs.computing import OPTIMIZER_BYTES, Case
from pyops.plan.costs.rank_memory import ELEMENT_BYTES, rank_parameters
from pyops.plan.layout import Layout

__all__ = ["offload_seconds"]


def offload_seconds(case: Case, layout: Layout) -> float:
    """Seconds that a step takes longer with its states in host memory than beside the parameters.

    Args:
        case: The model, the cluster, the program.
        layout: Which may offload.
    """
    host = case.cluster.host
    if layout.offload == "none" or host is None:
        return 0.0
    count = max(rank_parameters(case.shape, layout, rank) for rank in (0, layout.pp - 1))
    owned = count / layout.copies
    element = ELEMENT_BYTES[case.precision]
    down = max(case.software.gradient_bytes, element) * owned / host.bandwidth
    up = element * owned / host.bandwidth
    stepped = OPTIMIZER_BYTES * owned / host.memory_bandwidth
    device = case.cluster.device
    beside = OPTIMIZER_BYTES * owned / (device.memory_bandwidth * device.efficiency.memory)
    return max(0.0, max(down, up, stepped) - beside)
