"""Models that several tests plan for."""

from __future__ import annotations

from typing import Any

from pyops.plan import ModelShape

__all__ = ["LLAMA_8B", "TINY", "gpt", "llama", "mpt"]


def gpt(layers: int, width: int, heads: int, *, vocab: int = 51200, sequence: int = 2048) -> Any:
    """A GPT of Megatron-LM's papers."""
    return ModelShape(
        num_layers=layers,
        dim=width,
        num_heads=heads,
        vocab_size=vocab,
        sequence_length=sequence,
        name=f"GPT {layers} x {width}",
    )


def llama(layers: int, width: int, heads: int, inner: int, *, sequence: int = 8192) -> Any:
    """A Llama 3."""
    return ModelShape(
        num_layers=layers,
        dim=width,
        num_heads=heads,
        num_kv_heads=8,
        hidden=inner,
        vocab_size=128256,
        sequence_length=sequence,
        gated=True,
        bias=False,
        rms_norm=True,
        tied_head=False,
        learned_positions=False,
        name="Llama 3",
    )


def mpt(layers: int, width: int, heads: int, *, sequence: int) -> Any:
    """An MPT with a table of positions, as in llm-foundry's benchmarks."""
    return ModelShape(
        num_layers=layers,
        dim=width,
        num_heads=heads,
        vocab_size=50368,
        sequence_length=sequence,
        name=f"MPT {layers} x {width}",
    )


LLAMA_8B = llama(32, 4096, 32, 14336)
TINY = gpt(4, 64, 4, vocab=96, sequence=32)
