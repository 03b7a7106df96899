"""What a compressed collective refuses, and how one rank's mistake is raised on all of them.

rank 0   arguments fine   -- fingerprint of the call --.             raises DisagreementError
rank 1   a wrong dtype    -- fingerprint: refused -----+-- texts --  raises its TypeError
rank 2   arguments fine   -- fingerprint of the call --'             raises DisagreementError

Each rank waits for the others anyway, to compare what they call; so this costs nothing as long as
nobody is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.ops.memory import require_memory
from pyops.protocols import CollectiveCodec

__all__ = [
    "check_error",
    "check_length",
    "check_tensor",
    "compares",
    "mistake_of",
    "refuse",
    "refusing",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def mistake_of(check: Callable[[], None]) -> TypeError | ValueError | None:
    """What `check` raises."""
    try:
        check()
    except (TypeError, ValueError) as mistake:
        return mistake
    return None


def refuse(
    mistake: Exception, comm: Communicator | None, *, what: str, tensor: object, async_op: bool
) -> Any:
    """Raise `mistake`, from wait() when `async_op`, in the place of a collective in which the other
    ranks wait for this one."""
    if comm is None or comm.size == 1 or not compares(comm, tensor):
        raise mistake
    return comm.run(
        refusing(mistake, comm, what=what),
        what=what,
        tensor=torch.empty(0, device="cpu"),
        async_op=async_op,
        direct=False,
    )


def compares(comm: Communicator, tensor: object) -> bool:
    """Whether ranks compare what they call before they run it on such a tensor."""
    return (
        not (isinstance(tensor, Tensor) and tensor.is_cuda) or comm.backend(tensor.device) == "gloo"
    )


def refusing(mistake: Exception, comm: Communicator, *, what: str) -> Callable[[int], Tensor]:
    """A call for `Communicator.run` that tells the others of the mistake and raises it."""

    def call(spins: int) -> Tensor:
        if comm.size > 1:
            comm.agree(what, refusal=mistake)
        raise mistake

    return call


def check_tensor(
    tensor: Any, codec: Any, *, op: Any, segment_bytes: Any, in_pieces: bool = False
) -> None:
    """TypeError or ValueError for arguments that no rank can use.

    Args:
        in_pieces: The codec must write any part of a tensor.
    """
    if isinstance(codec, type) and issubclass(codec, Codec):
        raise TypeError(
            f"codec is the class {codec.__name__}; pass an object of it: {codec.__name__}()"
        )
    if not isinstance(codec, Codec):
        raise TypeError(f"codec must be a Codec, such as pyops.comm.OneBit(), got {codec!r}")
    if in_pieces and isinstance(codec, CollectiveCodec):
        raise ValueError(
            f"{codec.name} writes whole matrices, not pieces; use it with compressed_all_reduce"
        )
    if op not in ("mean", "sum"):
        raise ValueError(f"op must be 'mean' or 'sum', got {op!r}")
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"tensor is a {type(tensor).__name__}; pass one torch.Tensor, for several a "
            "pyops.flat.FlatBuffer's data or grad"
        )
    if tensor.dtype not in _FLOATS:
        raise TypeError(
            f"{codec.name} compresses float32, bfloat16 and float16, got {tensor.dtype}; "
            "use pyops.comm.all_reduce"
        )
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"a tensor of layout {tensor.layout} on {tensor.device} can't be compressed; "
            "pass a dense one"
        )
    if any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError(
            "an expanded tensor has several elements in one place and can't take a "
            "result; pass tensor.clone()"
        )
    require_memory(tensor, "tensor")
    if tensor.is_neg():
        raise ValueError(
            "tensor is a view whose sign is still to be taken (torch._neg_view); pass "
            "tensor.resolve_neg()"
        )
    if segment_bytes is not None and (
        isinstance(segment_bytes, bool) or not isinstance(segment_bytes, int)
    ):
        raise TypeError(
            f"segment_bytes is {segment_bytes!r}; give a whole number of bytes, or None"
        )
    if segment_bytes is not None and segment_bytes < 1024:
        raise ValueError(f"segment_bytes is {segment_bytes}; give at least 1024")


def check_error(
    error: Any, codec: Codec, *, x: Tensor, numel: int, comm: Communicator | None
) -> None:
    """TypeError or ValueError unless `error` is None or a memory of this codec, rank and size for
    `numel` elements like x."""
    rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
    if isinstance(codec, CollectiveCodec):
        codec.check_memory(error, numel=numel, rank=rank, size=size)
        return
    if error is None:
        return
    if not isinstance(error, ErrorFeedback):
        raise TypeError(
            f"error is a {type(error).__name__}; pass an ErrorFeedback, made once: "
            f"ErrorFeedback({numel}, codec=codec, "
            "communicator=Communicator.of(group))"
        )
    if error.codec != codec:
        raise ValueError(
            f"error is for codec {error.codec.name}, and this call is with {codec.name}; "
            "use one for both"
        )
    if error.numel != numel:
        raise ValueError(
            f"error is for {error.numel} elements, and this rank compresses {numel}; "
            f"make it for {numel}"
        )
    if (error.rank, error.size) != (rank, size):
        raise ValueError(
            f"error is that of rank {error.rank} of {error.size}, and this is rank "
            f"{rank} of {size}; make one for this group"
        )
    if error.worker.device != x.device:
        raise ValueError(
            f"error is on {error.worker.device}, the tensor on {x.device}; make it with "
            f"device={str(x.device)!r}"
        )


def check_length(rows: int, length: Any, *, rank: int, size: int) -> None:
    """TypeError or ValueError unless `rows` is this rank's part, as torch.tensor_split cuts, of
    `length` rows or of None."""
    if length is None:
        return
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(
            f"length is {length!r}; give the rows of the result, a whole number, or None"
        )
    if length < 0:
        raise ValueError(
            f"length is {length}; give the rows of the result, 0 or more, or None where "
            "all ranks have equally many"
        )
    part = length // size + (rank < length % size)
    if rows != part:
        raise ValueError(
            f"rank {rank} gives {rows} rows, but its part of length={length} over {size} "
            f"ranks is {part} rows"
        )
