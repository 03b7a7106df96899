"""Published counts of models with experts beside those of `pyops.plan.ExpertShape`: parameters, and
operations of a token as Megatron-Bridge reports them, by TFLOP/s over tokens a second.

    python -m benchmarks.plan.published_counts      write the table of docs/planner.md anew
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.plan.published_runs import PAGE
from pyops.plan import ExpertShape

__all__ = ["COUNTS", "Count", "fill"]

MARKED = re.compile(r"(<!-- counts:experts -->\n).*?(<!-- /counts -->)", re.DOTALL)


@dataclass(frozen=True)
class Count:
    """What was published of a model."""

    shape: ExpertShape
    """The model, with as many tokens in a row as the runs had."""
    billions: str
    """Parameters, as printed."""
    active: str
    """Of them those that a token uses, as printed."""
    embedding: bool
    """Whether the table of the embedding is among these."""
    teraflops: int
    """Of a device and second, as printed."""
    tokens: int
    """Of a device and second, of the same run."""
    ungated: bool = False
    """Whether the report leaves the gates of the experts out."""

    @property
    def counted_active(self) -> float:
        """In billions, with the embedding or without it, as published."""
        table = 0 if self.embedding else self.shape.decoder.embedding_parameters
        return (self.shape.active_parameters - table) / 1e9

    @property
    def published_operations(self) -> tuple[float, float]:
        """The least and the most GFLOP of a token that are printed so."""
        low, high = (1e3 * (self.teraflops + half) / self.tokens for half in (-0.5, 0.5))
        return low, high

    @property
    def operations(self) -> float:
        """GFLOP of a token, counted as the report has it: masked scores left out."""
        shape, found = self.shape, self.shape.operations(causal=True)
        if self.ungated:
            experts = shape.experts
            gates = shape.decoder.dim * experts.per_token * experts.hidden
            found -= 6.0 * shape.blocks * gates
        return found / 1e9


def _of(kind: str, name: str, tokens: int, **values: Any) -> ExpertShape:
    config = {"model_type": kind, "max_position_embeddings": tokens, **values}
    return ExpertShape.of_config(config, name=name)


def _qwen(name: str, tokens: int, dim: int, layers: int, heads: int, width: int) -> ExpertShape:
    return _of(
        "qwen3_moe",
        name,
        tokens,
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=3 * dim,
        moe_intermediate_size=width,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
    )


QWEN_30B = _qwen("Qwen3-30B-A3B", 4096, 2048, 48, 32, 768)
QWEN_235B = _qwen("Qwen3-235B-A22B", 4096, 4096, 94, 64, 1536)
GPT_OSS = _of(
    "gpt_oss",
    "gpt-oss-120b",
    8192,
    hidden_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=2880,
    num_local_experts=128,
    num_experts_per_tok=4,
    vocab_size=201088,
)
DEEPSEEK = _of(
    "deepseek_v3",
    "DeepSeek-V3",
    4096,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    vocab_size=129280,
)
PREDICTING = replace(
    DEEPSEEK,
    predicted=1,
    decoder=replace(DEEPSEEK.decoder, name="DeepSeek-V3, a further token predicted"),
)
COUNTS = (
    Count(QWEN_30B, "30.5", "3.3", True, 666, 28934),
    Count(QWEN_235B, "235", "22", True, 728, 4916),
    Count(GPT_OSS, "116.83", "5.13", False, 565, 18347, ungated=True),
    Count(DEEPSEEK, "671", "37", False, 961, 3848),
    Count(PREDICTING, "671", "37", False, 1199, 4612),
)


def text() -> str:
    """The table of docs/planner.md."""
    lines = [
        "| model | billions of parameters, published | counted | of a token, published | counted "
        "| GFLOP of a token, published | counted |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in COUNTS:
        low, high = each.published_operations
        digits = len(each.billions.partition(".")[2])
        table = "" if each.embedding else ", without the embedding"
        gates = ", without gates" if each.ungated else ""
        lines.append(
            f"| {each.shape.name} | {each.billions} | "
            f"{each.shape.num_parameters / 1e9:,.{digits}f} | {each.active} | "
            f"{each.counted_active:.2f}{table} | {low:.2f} to {high:.2f}{gates} | "
            f"{each.operations:.2f} |"
        )
    return "\n".join(lines)


def fill(page: str) -> str:
    """The page with its table made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{text()}\n{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
