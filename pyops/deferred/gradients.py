"""The gradient of a linear layer's weight or bias: put off where the parameter carries a queue, in
fp32 where it carries an fp32 sum."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accumulate_weight_gradient", "is_marked", "local_gradient", "weight_gradient"]

BLOCK_BYTES = 8 << 20  # of widened operands


def is_marked(parameter: Tensor | None) -> bool:
    """Whether its gradient may go elsewhere than to .grad at once: autograd's own product doesn't
    know."""
    return hasattr(parameter, "deferred") or hasattr(parameter, "main_grad")


def weight_gradient(parameter: Tensor, dy: Tensor, x: Tensor | None) -> Tensor | None:
    """The gradient of a linear layer's weight, dy^T x, or of its bias, the sum of dy (x None),
    shaped as the parameter.

    None where it was put off, or added to the weight's `main_grad`, [..., in] of fp32 or float64 (a
    bias has none).
    dy [rows, out], x [rows, in], of one dtype; parameter [.., in] or [..] with out elements in its
    leading dims.

    Args:
        parameter: A weight [.., in], or a bias [..], with out elements in its leading dims.
        dy: The gradient of the output, [rows, out].
        x: The input, [rows, in], of the dtype of dy; None for a bias.
    """
    queue = getattr(parameter, "deferred", None)
    if queue is not None and queue.put(parameter, dy, x):
        return None
    return local_gradient(parameter, dy, x)


def local_gradient(parameter: Tensor, dy: Tensor, x: Tensor | None) -> Tensor | None:
    """As `weight_gradient`, but never put off."""
    if x is None:
        return dy.sum(0).view(parameter.shape).to(parameter.dtype)
    main = getattr(parameter, "main_grad", None)
    if main is None:
        return (dy.t() @ x).view(parameter.shape).to(parameter.dtype)
    accumulate_weight_gradient(main.view(-1, main.shape[-1]), dy, x)
    return None


def accumulate_weight_gradient(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad += dy^T x, in place, in the dtype of main_grad: no 16-bit sum over micro-batches or
    chunks.

    main_grad [out, in], float32 or float64; dy [rows, out] and x [rows, in] of one dtype, no wider.

    Moves 8 bytes per weight, where a product in 16 bits and an addition move 12, and rounds once
    less. On CUDA it is one product of cuBLAS that takes 16-bit operands and accumulates in fp32; on
    the CPU, whose libraries have none, a block of operands at a time is widened to fp32.

    Args:
        main_grad: [out, in], float32 or float64.
        dy: The gradient of the output, [rows, out].
        x: The input, [rows, in], of the dtype of dy, no wider than main_grad.

    Raises:
        ValueError: Otherwise.
    """
    if main_grad.shape != (dy.shape[1], x.shape[1]) or len(dy) != len(x):
        raise ValueError(
            f"main_grad {tuple(main_grad.shape)} must be [out, in] for dy [rows, out] "
            "and x [rows, in]; got dy "
            f"{tuple(dy.shape)} and x {tuple(x.shape)}"
        )
    if main_grad.dtype not in (torch.float32, torch.float64) or dy.dtype != x.dtype:
        raise ValueError(
            "main_grad must be float32 or float64, dy and x of one dtype; got "
            f"{main_grad.dtype}, {dy.dtype} and {x.dtype}"
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
