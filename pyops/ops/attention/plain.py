"""Plain attention, which torch computes, too: whether its kernel is the faster one here.

plain: nothing hidden but by causality, nothing added, capped or dropped, T = S where causal
a kind of CPU or GPU in plain_table    torch's where it was measured to be faster
another kind of CPU                    ours
another kind of GPU                    torch's, until it is measured; and where ours has no kernel
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.attention.arguments import AttentionBias, AttentionDropout, AttentionMask
from pyops.ops.attention.plain_table import FASTER
from pyops.ops.library import has_kernel
from pyops.torch_private import constant_in_graphs

__all__ = ["is_torchs", "kind_of", "torch_attention"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _kind_of_cpu() -> str:
    """Maker and instruction set."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = re.search(r"vendor_id\s*:\s*(\S+)", text)
    amx = " AMX" if " amx_tile" in text else ""
    return f"{found.group(1) if found else 'CPU'} {torch.backends.cpu.get_cpu_capability()}{amx}"


CPU = _kind_of_cpu()


def kind_of(device: torch.device) -> str:
    """What decides which kernel is faster: maker and instruction set of the CPU, or the GPU's
    generation."""
    return CPU if device.type == "cpu" else _kind_of_gpu(device)


def _capability(device: torch.device) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


# A constant while torch.compile traces
_kind_of_gpu: Callable[[torch.device], str] = constant_in_graphs(_capability)


@constant_in_graphs
def _cuda_has_kernel() -> bool:
    return has_kernel("attention_forward", "cuda")


def is_torchs(
    q: Tensor,
    k: Tensor,
    mask: AttentionMask,
    bias: AttentionBias,
    dropout: AttentionDropout | None,
    soft_cap: float | None,
) -> bool:
    """Whether these checked arguments are plain attention that torch's kernel is faster in."""
    T, S, K = q.shape[1], k.shape[1], q.shape[3]
    plain = (
        all(x is None for x in (mask.window, mask.keys, mask.documents, mask.places, mask.layout))
        and all(x is None for x in (bias.scores, bias.table, bias.slopes))
        and (T == S or not mask.causal)
        and soft_cap is None
        and (dropout is None or dropout.p == 0)
        and q.dtype in DTYPES
        and min(q.numel(), k.numel()) > 0
    )
    if not plain or q.device.type not in ("cpu", "cuda"):
        return False
    cuda = q.device.type == "cuda"
    if cuda and not _cuda_has_kernel():
        return True
    table = FASTER.get(kind_of(q.device))
    if table is None:
        return cuda
    widths = [w for _, w, _ in table if w >= K]
    ranges = table.get((str(q.dtype), min(widths, default=0), mask.causal), ())
    return any(first <= T <= last for first, last in ranges)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Tensor:
    """torch's own, of [B, T, H, K]."""
    y = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return y.transpose(1, 2).contiguous()
