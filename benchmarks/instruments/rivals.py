"""Other people's kernels, where they are installed: Liger, Transformer Engine, Apex, bitsandbytes,
and torch.compile.

None is needed. One that is not installed is not mentioned; one that fails is left out of its row,
and the reason printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.instruments.accuracy import Layer

__all__ = ["compiled", "installed", "of_adamw", "of_lamb", "of_norm", "of_rotary", "of_swiglu"]


def installed(makers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What the makers that work here have made, by name."""
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except ImportError:
            continue
        except Exception as error:
            print(f"{name} is left out: {type(error).__name__}: {error}", flush=True)
    return found


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for the shapes it is called with first.

    What was compiled before is forgotten: after eight sets of shapes of one function torch would
    give up and run it as it is.
    """
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def of_norm(kind: str, width: int, device: torch.device) -> dict[str, Layer]:
    """Layers that take what ours of `kind` takes: x, [residual,] weight[, bias]; eps 1e-5 for layer
    norm, 1e-6 for RMS norm."""
    if device.type != "cuda":
        return {}
    root, added = kind.endswith("RMS norm"), kind.startswith("residual")

    def alone(norm: Callable[..., Tensor]) -> Layer:
        def after_sum(x: Tensor, residual: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
            s = x + residual
            return norm(s, *vectors), s

        return after_sum if added else norm

    def liger() -> Layer:
        from liger_kernel.transformers import functional as theirs

        if root and added and hasattr(theirs, "liger_fused_add_rms_norm"):
            return lambda x, r, w: theirs.liger_fused_add_rms_norm(x, r, w, 1e-6, in_place=False)
        if root:
            return alone(lambda x, w: theirs.liger_rms_norm(x, w, 1e-6, in_place=False))
        return alone(lambda x, w, b: theirs.liger_layer_norm(x, w, b, 1e-5))

    def engine() -> Layer:
        import transformer_engine.pytorch as te

        module = te.RMSNorm(width, eps=1e-6) if root else te.LayerNorm(width, eps=1e-5)
        return alone(
            lambda x, *v: torch.func.functional_call(
                module, dict(zip(("weight", "bias"), v, strict=False)), (x,)
            )
        )

    def apex() -> Layer:
        from apex.normalization import fused_layer_norm as theirs

        if root:
            return alone(lambda x, w: theirs.fused_rms_norm_affine(x, w, (width,), 1e-6))
        return alone(lambda x, w, b: theirs.fused_layer_norm_affine(x, w, b, (width,), 1e-5))

    return installed({"Liger": liger, "Transformer Engine": engine, "Apex": apex})


def of_swiglu(device: torch.device) -> dict[str, Layer]:
    """silu(gate) * up of two tensors, which a rival may overwrite in backward."""

    def liger() -> Layer:
        from liger_kernel.transformers import functional as theirs

        return lambda gate, up: theirs.liger_swiglu(gate, up)

    return installed({"Liger": liger}) if device.type == "cuda" else {}


def of_rotary(angle: Tensor, *, dtype: torch.dtype) -> dict[str, Layer]:
    """Halves of the last dimension of x [1, tokens, heads, width] turned by angle [tokens, width /
    2]."""

    def liger() -> Layer:
        from liger_kernel.transformers import functional as theirs

        whole = torch.cat([angle, angle], dim=-1)[None]
        cos, sin = whole.cos().to(dtype), whole.sin().to(dtype)
        # It turns queries and keys in place, heads before tokens: two halves of the heads stand for
        # them.
        return lambda x: torch.cat(
            [
                t.transpose(1, 2)
                for t in theirs.liger_rope(
                    *(h.transpose(1, 2).clone() for h in x.chunk(2, dim=2)), cos, sin
                )
            ],
            2,
        )

    def engine() -> Layer:
        from transformer_engine.pytorch.attention import apply_rotary_pos_emb

        frequencies = torch.cat([angle, angle], dim=-1)[:, None, None].float()
        return lambda x: apply_rotary_pos_emb(x, frequencies, tensor_format="bshd", fused=True)

    return (
        installed({"Liger, with copies": liger, "Transformer Engine": engine})
        if angle.is_cuda
        else {}
    )


def of_adamw(
    twins: Callable[[], list[nn.Parameter]], hyper: Mapping[str, Any]
) -> dict[str, Callable[[], object]]:
    """Steps of AdamW on parameters of their own. bitsandbytes' has moments of 8 bits: fewer bytes,
    and another result."""

    def apex() -> Callable[[], object]:
        from apex.optimizers import FusedAdam

        return FusedAdam(twins(), adam_w_mode=True, **hyper).step

    def engine() -> Callable[[], object]:
        from transformer_engine.pytorch.optimizers import FusedAdam

        return FusedAdam(twins(), adam_w_mode=True, **hyper).step

    def bits() -> Callable[[], object]:
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(twins(), **hyper).step

    return installed({"Apex": apex, "Transformer Engine": engine, "bitsandbytes 8-bit": bits})


def of_lamb(
    twins: Callable[[], list[nn.Parameter]], hyper: Mapping[str, Any]
) -> dict[str, Callable[[], object]]:
    """Steps of LAMB on parameters of their own; Apex' also clips by the global norm, which it takes
    in any case."""

    def apex() -> Callable[[], object]:
        from apex.optimizers import FusedLAMB

        return FusedLAMB(twins(), **hyper).step

    return installed({"Apex": apex})
