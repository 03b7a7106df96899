"""How parameters and gradients travel: as they are, or as ZeRO++ has it, in few bits and within a
small group.

    gather_codec      forward, backward:   shard --int8--> all ranks   twice less than 16 bits, four
                                                                       times less than 32
    secondary_group   forward:  shard --> all ranks, of which each keeps the part that is its own in
                                the small group
                      backward, and forwards before the next step:  that part --> the ranks of the
                                                                    small group
    reduce_codec      backward: gradient --int8--> the owner of each part, who sums in float32, in
                      the order of the ranks

    nodes of two ranks   | 0  1 | 2  3 |   secondary_group of 0 and 1: their own links carry what
                                           backward gathers

Wang et al., ZeRO++, arXiv:2306.10209: qwZ, hpZ and qgZ (with one quantisation on the way, not two).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_gather
from pyops.comm.collectives.work import Work
from pyops.comm.compression.codec import Codec
from pyops.mesh import ProcessGroupLike, resolve
from pyops.zero.config import ZeroConfig

__all__ = ["QuantizedComm", "coded_all_gather", "quantized_comm_of", "ranks_of", "takes_dtype"]

LINE = 64  # bytes: payloads begin at multiples of it


@dataclass(frozen=True)
class QuantizedComm:
    """How parameters and gradients are sent."""

    gather: Codec | None = None
    """Of parameters; None: as they are."""

    reduce: Codec | None = None
    """Of gradients; None: as they are."""

    secondary: Communicator | None = None
    """Of the ranks among which backward gathers; None: all of them."""


def takes_dtype(codec: Codec | None, dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype go through the codec; others, float64 say, travel as they
    are."""
    return codec is not None and dtype in (torch.float32, torch.bfloat16, torch.float16)


def ranks_of(config: ZeroConfig) -> list[int] | None:
    """The ranks of the secondary group; None without one."""
    group = config.secondary_group
    return None if group is None else sorted(dist.get_process_group_ranks(group))


def quantized_comm_of(
    config: ZeroConfig, secondary_ranks: Sequence[list[int] | None], *, group: ProcessGroupLike
) -> QuantizedComm:
    """The codecs and the secondary group of a checked config.

    Args:
        config: this rank's.
        secondary_ranks: the ranks of each rank's secondary group, in the order of `group`.
        group: all data-parallel ranks.

    Raises:
        ValueError: on every rank, unless the secondary groups divide `group` evenly.
    """
    if all(members is None for members in secondary_ranks):
        return QuantizedComm(config.gather_codec, config.reduce_codec)
    everyone = resolve(group, "ZeroOptimizer")
    ranks = [0] if everyone is None else dist.get_process_group_ranks(everyone)
    of = dict(zip(ranks, secondary_ranks, strict=True))
    for rank, members in of.items():
        if (
            members is None
            or rank not in members
            or any(of.get(other) != members for other in members)
        ):
            raise ValueError(
                f"ZeroOptimizer: secondary_group of rank {rank} is {members}; the secondary groups "
                f"must divide the ranks of the data-parallel group, {ranks}, among them: pass the "
                "one that each rank is in"
            )
        if len(members) != len(of[ranks[0]] or ()):
            raise ValueError(
                f"ZeroOptimizer: secondary_group has {len(members)} ranks on rank {rank} "
                f"and {len(of[ranks[0]] or ())} on rank {ranks[0]}; the secondary groups must be "
                "equally large"
            )
    secondary = Communicator.of(config.secondary_group)
    return QuantizedComm(config.gather_codec, config.reduce_codec, secondary)


class _Decoding(Work):
    """Payloads on their way, which the wait turns into numbers."""

    def __init__(self, work: Work, codec: Codec, out: Tensor, ranks: int) -> None:
        self._work, self._codec, self._out, self._ranks = work, codec, out, ranks

    def wait(self) -> Tensor:
        payloads = self._work.wait().view(self._ranks, -1)
        each = self._out.numel() // self._ranks
        for rank, payload in enumerate(payloads):
            part = self._out[rank * each : (rank + 1) * each]
            self._codec.decode(payload[: self._codec.payload_bytes(each)], part)
        return self._out

    def is_completed(self) -> bool:
        return self._work.is_completed()


def coded_all_gather(
    shard: Tensor,
    out: Tensor,
    *,
    codec: Codec,
    communicator: Communicator,
    async_op: bool,
    label: str,
) -> Work:
    """out = all ranks' shards as the codec writes them, with the same bits on every rank, this
    one's own part too."""
    payload = torch.zeros(
        -(-codec.payload_bytes(shard.numel()) // LINE) * LINE,
        dtype=torch.uint8,
        device=shard.device,
    )
    codec.encode(shard, payload[: codec.payload_bytes(shard.numel())])
    found: Any = all_gather(
        payload, communicator=communicator, async_op=async_op, label=f"{label}, {codec.name}"
    )
    return _Decoding(found if async_op else Work(found), codec, out, communicator.size)
