"""Vectors on the wire: where a model's numbers lie, how they are cut into shards and how a part is
written.

    FlatBuffer of the model    |  shard 0  |  shard 1  |  shard 2  |    cut at multiples of 64
    a push                     codec(gradients + error)                        error stays here
    a fetch                    codec(parameters - what the replica has)        both sides add it
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor, nn

from pyops.comm.compression.codec import LINE, Codec
from pyops.comm.compression.error_feedback import chunk_starts
from pyops.flat import FlatBuffer

__all__ = [
    "Part",
    "all_finite",
    "check_model",
    "cut",
    "flat_values",
    "layout_digest",
    "named_parameters",
]

DTYPES = (torch.float32, torch.float64)


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are trained, in registration order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def check_model(model: nn.Module, *, buffers: str, codecs: bool) -> None:
    """ValueError for a model that shards can't hold.

    Args:
        model: The replica's.
        buffers: As of DownpourConfig.
        codecs: Whether pushes or fetches are written by a codec.
    """
    named = named_parameters(model)
    if not named:
        raise ValueError("the model has no parameter with requires_grad; there is nothing to push")
    for name, parameter in named:
        if parameter.dtype not in DTYPES or parameter.device.type != "cpu":
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype} on {parameter.device}; shards hold fp32 "
                "or fp64 on the CPU: keep such parameters, and compute in 16 bits under "
                "torch.autocast"
            )
        if codecs and parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}, and codecs write fp32; leave out "
                "push_codec and fetch_codec, or call model.float()"
            )
    moving = [n for n, b in model.named_buffers() if b.is_floating_point() and "running_" in n]
    if moving and buffers == "refuse":
        raise ValueError(
            f"buffer {moving[0]!r} is a running statistic, which has no gradient to push; give "
            'buffers="own" to let each replica keep its own, or take layer or group norm'
        )


def layout_digest(model: nn.Module, *, shards: int) -> str:
    """What a replica and a shard must have in common, in 64 hexadecimal digits: every parameter's
    name, shape and dtype, and the number of shards."""
    named = [(name, list(p.shape), str(p.dtype)) for name, p in named_parameters(model)]
    return hashlib.sha256(json.dumps([named, shards]).encode()).hexdigest()


def cut(model: nn.Module, *, shards: int) -> list[int]:
    """Where each shard's part of the model's vector begins, and the end. ValueError where a shard
    would have none."""
    numel = FlatBuffer.layout_of(named_parameters(model)).numel
    starts = chunk_starts(numel, size=shards, multiple=LINE)
    if starts[-2] >= numel:
        fewer = range(shards - 1, 0, -1)
        fits = (n for n in fewer if chunk_starts(numel, size=n, multiple=LINE)[-2] < numel)
        raise ValueError(
            f"shards is {shards}, but the model's {numel} numbers are cut at multiples of {LINE}; "
            f"give {next(fits)} shards"
        )
    return starts


def all_finite(numbers: Tensor) -> bool:
    """Whether no number is nan or infinite.

    Args:
        numbers: One or more.
    """
    # A sum takes about two thirds of the time of a minimum and a maximum. It is nan or infinite
    # where a number is, and where large numbers overflow.
    if bool(numbers.sum().isfinite()):
        return True
    low, high = numbers.aminmax()  # nan where there is one
    return bool(low.isfinite() & high.isfinite())


def flat_values(model: nn.Module) -> Tensor:
    """A copy of the parameters, as a FlatBuffer of them has them; the model stays as it is."""
    named = named_parameters(model)
    layout = FlatBuffer.layout_of(named)
    values = torch.zeros(layout.numel, dtype=named[0][1].dtype, device="cpu")
    for name, parameter in named:
        values[layout.slice(name)] = parameter.detach().reshape(-1)
    return values


class Part:
    """How `numel` numbers of one part travel one way.

    Args:
        numel: Numbers in the part.
        dtype: fp32, or fp64 without a codec.
        codec: How they are written; None: as they are.
        feedback: Whether what the codec leaves out is added the next time.
    """

    def __init__(
        self, numel: int, *, dtype: torch.dtype, codec: Codec | None, feedback: bool = False
    ) -> None:
        self.numel, self.dtype, self.codec = numel, dtype, codec
        self.whole_bytes = numel * dtype.itemsize
        self.payload_bytes = self.whole_bytes if codec is None else codec.payload_bytes(numel)
        kept = codec is not None and codec.feedback and feedback
        self.error = torch.zeros(numel, dtype=torch.float32, device="cpu") if kept else None
        self._rounds = 0

    def write(self, vector: Tensor, payload: Tensor, *, whole: bool = False) -> None:
        """payload <- vector, by the codec, or as it is."""
        if whole or self.codec is None:
            payload.view(vector.dtype).copy_(vector)
            return
        self._rounds += 1
        scale = self.codec.scale_of(vector, self.error)
        self.codec.encode(vector, payload, error=self.error, scale=scale, seed=self._rounds)

    def read(self, payload: Tensor, out: Tensor, *, whole: bool = False) -> None:
        """out <- the numbers of the payload."""
        if whole or self.codec is None:
            out.copy_(payload.view(out.dtype))
        else:
            self.codec.decode(payload, out)
