"""The tensor of a collective: what no collective takes, and the flat view that algorithms add up.

tensor -> flat contiguous view (or copy) of a summable dtype -> algorithm -> back
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyops.comm.collectives.arithmetic import summable_view
from pyops.comm.collectives.communicator import ALGORITHMS
from pyops.ops.memory import require_memory

__all__ = ["check_operand", "check_out", "flat_operand", "like_operand", "width_of_row"]

# Of a ring's piece or a slice: on TCP the time of a message is well above its latency from here on.
SEGMENT_BYTES = 1 << 20


def check_operand(
    tensor: Tensor, algorithm: str, segment_bytes: int | None, *, written: bool
) -> int:
    """ValueError for arguments that no collective takes; the bytes of a segment."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {ALGORITHMS}, got {algorithm!r}")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"a tensor of layout {tensor.layout} can't be communicated; pass tensor.to_dense()"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"a tensor on {tensor.device} has no memory that ranks can exchange; pass "
            "one on the CPU or on CUDA"
        )
    require_memory(tensor, "a tensor that")
    if (
        written
        and not tensor.is_contiguous()
        and any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    ):
        raise ValueError(
            "an expanded tensor has several elements in one place and can't take a "
            "result; pass tensor.clone()"
        )
    if algorithm == "shared_memory" and tensor.is_cuda:
        raise ValueError(
            "algorithm='shared_memory' takes CPU tensors; use 'two_shot' or 'native' on CUDA"
        )
    if segment_bytes is None:
        return SEGMENT_BYTES
    if segment_bytes < 1024:
        raise ValueError(f"segment_bytes is {segment_bytes}; give at least 1024")
    return segment_bytes


def check_out(out: Tensor | None, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """ValueError for a place that the result does not fit into."""
    if out is None:
        return
    if (out.dtype, out.device, tuple(out.shape)) != (
        tensor.dtype,
        tensor.device,
        shape,
    ) or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} of {out.dtype} on "
            f"{out.device}{'' if out.is_contiguous() else ', not contiguous'}; the "
            f"result is {shape} of {tensor.dtype} on {tensor.device}"
        )
    require_memory(out, "out")
    if out.is_neg() or out.is_conj():
        raise ValueError(
            "out is a view whose sign or conjugate is still to be taken; pass a plain "
            "tensor, as torch.empty makes it"
        )


def flat_operand(tensor: Tensor, *, host: bool) -> tuple[Tensor, bool]:
    """(flat contiguous tensor of a summable dtype, whether it is a copy)."""
    whole = tensor.detach()
    plain = whole.is_contiguous() and not host and not whole.is_conj() and not whole.is_neg()
    if not plain:
        whole = whole.resolve_conj().resolve_neg().contiguous()
        whole = whole.cpu() if host else whole
    return summable_view(whole.view(-1)), whole.data_ptr() != tensor.data_ptr() or host


def like_operand(flat: Tensor, tensor: Tensor) -> Tensor:
    """Undo `summable_view`."""
    return flat if flat.dtype == tensor.dtype else flat.view(tensor.dtype)


def width_of_row(tensor: Tensor) -> int:
    """Bytes of a row of a tensor that has no rows."""
    width = tensor.element_size()
    for size in tensor.shape[1:]:
        width *= size
    return width
