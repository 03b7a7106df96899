"""The weight gradient of a linear layer, added to what is there in fp32: no 16-bit sum over micro-batches or chunks.

    main_grad [out, in] fp32  +=  dy^T x        dy [rows, out], x [rows, in]: fp32, bf16 or fp16

Moves 8 bytes per weight, where a product in 16 bits and an addition move 12, and rounds once less. On CUDA it is one product of
cuBLAS that takes 16-bit operands and accumulates in fp32; on the CPU, whose libraries have none, a block of operands at a time
is widened to fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accumulate_weight_gradient"]

BLOCK_BYTES = 8 << 20  # of widened operands


def accumulate_weight_gradient(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad += dy^T x, in place, in the dtype of main_grad.

    main_grad [out, in], float32 or float64; dy [rows, out] and x [rows, in] of one dtype, no wider. ValueError otherwise.
    """
    if main_grad.shape != (dy.shape[1], x.shape[1]) or len(dy) != len(x):
        raise ValueError(
            f"main_grad {tuple(main_grad.shape)} must be [out, in] for dy [rows, out] and x [rows, in]; got dy "
            f"{tuple(dy.shape)} and x {tuple(x.shape)}"
        )
    if main_grad.dtype not in (torch.float32, torch.float64) or dy.dtype != x.dtype:
        raise ValueError(
            f"main_grad must be float32 or float64, dy and x of one dtype; got {main_grad.dtype}, {dy.dtype} and {x.dtype}"
        )
    if dy.dtype == main_grad.dtype:
        main_grad.addmm_(dy.t(), x)
    elif main_grad.dtype == torch.float64 or not main_grad.is_cuda:
        wide = x.to(main_grad.dtype)
        each = max(1, BLOCK_BYTES // (max(1, len(dy)) * main_grad.element_size()))
        for start in range(0, dy.shape[1], each):
            block = dy[:, start : start + each].to(main_grad.dtype)
            main_grad[start : start + each].addmm_(block.t(), wide)
    else:
        torch.ops.aten.addmm.dtype_out(main_grad, dy.t(), x, torch.float32, out=main_grad)
