"""How parameters and gradients travel: as they are, or as ZeRO++ has it, in few bits and within a
small group.

    gather_codec        forward, backward:   shard --int8--> all ranks      twice less than 16 bits, four times less than 32
    secondary_group     forward:  shard --> all ranks, of which each keeps the part that is its own in the small group
                        backward, and forwards before the next step:  that part --> the ranks of the small group
    reduce_codec        backward: gradient --int8--> the owner of each part, who sums in float32, in the order of the ranks

    nodes of two ranks    | 0  1 | 2  3 |        secondary_group of 0 and 1: their own links carry what backward gathers

Wang et al., ZeRO++, arXiv:2306.10209: qwZ, hpZ and qgZ (with one quantisation on the way, not two).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.agreement import gather
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_gather
from pyops.comm.collectives.work import Work
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.eight_bit import FP8, Int8
from pyops.comm.compression.floats import BF16

__all__ = ["Wire", "check_wire", "coded_all_gather", "speaks", "wire_of"]

LINE = 64  # bytes: payloads begin at multiples of it


@dataclass(frozen=True)
class Wire:
    """gather, reduce: codecs of parameters and of gradients, None for numbers as they are.
    secondary: of the small group."""

    gather: Codec | None = None
    reduce: Codec | None = None
    secondary: Communicator | None = None


def speaks(codec: Codec | None, dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype go through the codec; others, float64 say, travel as they
    are."""
    return codec is not None and dtype in (torch.float32, torch.bfloat16, torch.float16)


def check_wire(*, stage: int, gather_codec: Any, reduce_codec: Any, secondary_group: Any) -> None:
    """TypeError or ValueError for arguments of ZeroOptimizer that make no sense."""
    who = "ZeroOptimizer"
    for name, codec, stages in (
        ("gather_codec", gather_codec, (3,)),
        ("reduce_codec", reduce_codec, (1, 2, 3)),
    ):
        if codec is None:
            continue
        if not isinstance(codec, Int8 | FP8 | BF16):
            raise TypeError(
                f"{who}: {name} is {codec!r}; give pyops.comm.Int8(), FP8() or BF16(), or None"
            )
        if getattr(codec, "stochastic_rounding", False) and name == "gather_codec":
            raise ValueError(
                f"{who}: {name} rounds at random, and gathers of a step must agree; use "
                f"{type(codec).__name__}()"
            )
        if stage not in stages:
            raise ValueError(
                f"{who}: {name} has no meaning at stage {stage}; it is for stage "
                f"{' and '.join(map(str, stages))}"
            )
    if secondary_group is None:
        return
    if not isinstance(secondary_group, dist.ProcessGroup):
        raise TypeError(
            f"{who}: secondary_group is {secondary_group!r}; give the process group of "
            "this rank's node, or None"
        )
    if stage != 3:
        raise ValueError(
            f"{who}: secondary_group has no meaning at stage {stage}; it is for stage 3, "
            "which gathers parameters"
        )


def wire_of(
    gather_codec: Codec | None,
    reduce_codec: Codec | None,
    secondary_group: dist.ProcessGroup | None,
    *,
    group: dist.ProcessGroup | None,
) -> Wire:
    """The wire of checked arguments. A collective; ValueError, on every rank, unless the small
    groups divide the large one."""
    mine = (
        None if secondary_group is None else sorted(dist.get_process_group_ranks(secondary_group))
    )
    everyone = gather(mine, group=group)
    if all(members is None for members in everyone):
        return Wire(gather_codec, reduce_codec)
    ranks = (
        list(range(1))
        if not dist.is_initialized()
        else dist.get_process_group_ranks(group or dist.group.WORLD)
    )
    of = dict(zip(ranks, everyone, strict=True))
    for rank, members in of.items():
        if (
            members is None
            or rank not in members
            or any(of.get(other) != members for other in members)
        ):
            raise ValueError(
                f"ZeroOptimizer: secondary_group of rank {rank} is {members}; the small "
                "groups must divide the ranks of "
                f"`group`, {ranks}, among them: pass the one that each rank is in"
            )
        if len(members) != len(of[ranks[0]] or ()):
            raise ValueError(
                f"ZeroOptimizer: secondary_group has {len(members)} ranks on rank {rank} "
                f"and {len(of[ranks[0]] or ())} on rank "
                f"{ranks[0]}; the small groups must be equally large"
            )
    return Wire(gather_codec, reduce_codec, Communicator.of(secondary_group))


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
