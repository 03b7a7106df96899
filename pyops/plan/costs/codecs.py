"""Compressed gradients: bytes on the wire, memory of what is left out, and the time of coding.

A codec of `pyops.comm.compression` says itself how many bytes n numbers take; of PowerSGD, whose
payload goes by the shapes of the matrices, the factors of a block's are counted.
"""

from __future__ import annotations

from pyops.comm.compression.names import parse
from pyops.comm.compression.power_sgd import PowerSGD
from pyops.plan.clusters import Device
from pyops.plan.shapes import ModelShape

__all__ = ["codec_bytes", "codec_memory", "codec_seconds"]

SAMPLE = 1 << 20  # numbers of which a codec is asked
PASSES = 28.0  # bytes of a number that coding moves: gradient and error read, error and sum written
OPERATIONS = {"power_sgd": 8.0, "topk": 2.0}  # of PowerSGD: products; of topk: how many PASSES


def codec_bytes(name: str, shape: ModelShape, *, exact: float) -> float:
    """Bytes of a gradient's element on the wire, in each direction.

    Args:
        name: "none", or of `pyops.plan.layout.CODECS`.
        shape: Of the model.
        exact: Bytes without a codec.
    """
    if name == "none":
        return exact
    codec = parse(name)
    if isinstance(codec, PowerSGD):
        whole = shape.block_matrices
        wide = shape.query_width + 2 * shape.kv_width
        sides = [(shape.dim, wide), (shape.query_width, shape.dim)]
        sides += [(shape.dim, shape.inner)] * (3 if shape.gated else 2)
        return 4.0 * codec.rank * sum(m + n for m, n in sides) / whole
    return codec.payload_bytes(SAMPLE) / SAMPLE


def codec_memory(name: str, *, copies: int) -> float:
    """Bytes of a gradient's element that are kept for what was left out: of the own gradients, and
    of the part of the sum that a rank owns.

    Args:
        name: "none", or of `pyops.plan.layout.CODECS`.
        copies: Ranks that sum.
    """
    if name == "none":
        return 0.0
    return 4.0 if name == "power_sgd" else 4.0 + 4.0 / copies


def codec_seconds(name: str, device: Device, count: float) -> float:
    """Seconds that a rank codes its gradients, by the bytes that this moves: an estimate.

    Args:
        name: "none", or of `pyops.plan.layout.CODECS`.
        device: That codes.
        count: Elements.
    """
    if name == "none":
        return 0.0
    passes = PASSES * OPERATIONS.get(name, 1.0)
    return passes * count / (device.memory_bandwidth * device.efficiency.memory)
