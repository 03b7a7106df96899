"""A reduction of torch in the terms of MPI: its operation, its datatype, and the tensor's memory.

torch: op, tensor of any strides --> MPI: op, contiguous numbers of a datatype --> tensor
                                          (16-bit floats as fp32)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.mpi.transport import as_bytes

__all__ = [
    "HALVES",
    "average_",
    "copy_back",
    "in_place",
    "numbers_of",
    "operation_of",
    "reduce_in_place",
]

HALVES = (torch.float16, torch.bfloat16)


def in_place() -> Any:
    """MPI's word for: the numbers are where the result goes."""
    from mpi4py import MPI

    return MPI.IN_PLACE


def operation_of(op: Any, tensor: Tensor) -> Any:
    """MPI's operation for one of torch."""
    from mpi4py import MPI

    if tensor.dtype == torch.bool:
        known = [(dist.ReduceOp.SUM, MPI.LOR), (dist.ReduceOp.MAX, MPI.LOR)]
        known += [(dist.ReduceOp.PRODUCT, MPI.LAND), (dist.ReduceOp.MIN, MPI.LAND)]
    else:
        known = [(dist.ReduceOp.SUM, MPI.SUM), (dist.ReduceOp.AVG, MPI.SUM)]
        known += [(dist.ReduceOp.PRODUCT, MPI.PROD), (dist.ReduceOp.MIN, MPI.MIN)]
        known += [(dist.ReduceOp.MAX, MPI.MAX), (dist.ReduceOp.BAND, MPI.BAND)]
        known += [(dist.ReduceOp.BOR, MPI.BOR), (dist.ReduceOp.BXOR, MPI.BXOR)]
    for torch_op, found in known:
        if op == torch_op:
            return found
    raise ValueError(
        f"the backend of MPI has no reduction {op} of {tensor.dtype}; it has SUM, AVG, PRODUCT, "
        "MIN, MAX, BAND, BOR and BXOR"
    )


def numbers_of(tensor: Tensor) -> list[Any]:
    """The memory of a contiguous tensor with MPI's name of its dtype."""
    from mpi4py import MPI

    names = {
        torch.float32: "FLOAT",
        torch.float64: "DOUBLE",
        torch.int8: "INT8_T",
        torch.uint8: "UINT8_T",
        torch.int16: "INT16_T",
        torch.int32: "INT32_T",
        torch.int64: "INT64_T",
        torch.bool: "C_BOOL",
        torch.complex64: "C_FLOAT_COMPLEX",
        torch.complex128: "C_DOUBLE_COMPLEX",
    }
    if tensor.dtype not in names:
        raise ValueError(
            f"MPI has no reduction of {tensor.dtype}; convert it to {', '.join(map(str, names))}, "
            "or a 16-bit float"
        )
    return [as_bytes(tensor), getattr(MPI, names[tensor.dtype])]


def reduce_in_place(tensor: Tensor, op: Any, call: Callable[[Any, Any], None], size: int) -> None:
    """Reduce a tensor in place by `call`, of its numbers and MPI's operation; `size` divides an
    average."""
    as_bytes(tensor)  # refuses other devices
    flat = tensor.contiguous()
    wide = flat.float() if flat.dtype in HALVES else flat
    call(numbers_of(wide), operation_of(op, wide))
    average_(wide, op, size)
    copy_back(wide, tensor)


def average_(tensor: Tensor, op: Any, size: int) -> None:
    """Divide a sum by the number of ranks where `op` is torch's average, which MPI has not."""
    if op == dist.ReduceOp.AVG:
        tensor.div_(size)


def copy_back(found: Tensor, tensor: Tensor) -> None:
    """Copy a result to the tensor, unless it lies there already."""
    if found.data_ptr() != tensor.data_ptr() or found.dtype != tensor.dtype:
        tensor.copy_(found.view(tensor.shape))
