"""Published runs of other programs, beside what `pyops.plan` predicts for them.

Each table has its source, what of it was fitted, and the bound within which the other rows are
predicted; docs/planner.md shows them, and tests/plan/test_published.py holds them.

    python -m benchmarks.plan.published_runs      write the tables of docs/planner.md anew
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.plan.published_table import Run, Table, text
from pyops.plan import FSDP, MEGATRON, MEGATRON_CORE, Layout, ModelShape

__all__ = ["TABLES", "fill"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planner.md"
FLASH_2 = replace(MEGATRON_CORE, attention=0.35)
"""FlashAttention-2, which reaches 35 % of an H100's peak (Shah et al., FlashAttention-3,
arXiv:2407.08608, abstract)."""
ASSUMED = "attention at 35 % of an H100's peak, as arXiv:2407.08608 has it of FlashAttention-2"
MARKED = re.compile(r"(<!-- published:(\w+) -->\n).*?(<!-- /published -->)", re.DOTALL)


def gpt(
    layers: int, width: int, heads: int, *, vocab: int = 51200, sequence: int = 2048
) -> ModelShape:
    """A GPT as Megatron-LM has it."""
    return ModelShape(
        num_layers=layers,
        dim=width,
        num_heads=heads,
        vocab_size=vocab,
        sequence_length=sequence,
    )


def llama(layers: int, width: int, heads: int, inner: int) -> ModelShape:
    """A Llama 3 on 8,192 tokens."""
    return ModelShape(
        num_layers=layers,
        dim=width,
        num_heads=heads,
        num_kv_heads=8,
        hidden=inner,
        vocab_size=128256,
        sequence_length=8192,
        gated=True,
        bias=False,
        rms_norm=True,
        tied_head=False,
        learned_positions=False,
    )


def _korthikanti() -> Table:
    rows = (
        # layers, width, heads, pp, v, micro-batch, micro-batches: seconds of both ways
        ("22B", 48, 6144, 64, 1, 1, 4, 1, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 3, 1, 64, 18.13, 13.75),
        ("530B", 105, 20480, 128, 35, 3, 1, 280, 49.05, 37.83),
        ("1T", 128, 25600, 160, 64, 1, 1, 512, 94.42, 71.49),
    )
    runs = []
    for name, layers, width, heads, pp, v, micro, number, full, selective in rows:
        schedule = "none" if pp == 1 else "interleaved" if v > 1 else "1f1b"
        layout = Layout(
            tp=8,
            pp=pp,
            stages_per_rank=v,
            schedule=schedule,
            micro_batch=micro,
            num_microbatches=number,
            recompute="block",
        )
        less = replace(layout, recompute="attention", sequence_parallel=True)
        for what, each, seconds in (
            ("blocks recomputed", layout, full),
            ("sequence parallel, attention recomputed", less, selective),
        ):
            shape = gpt(layers, width, heads)
            runs.append(Run(f"{name}, {what}", shape, each, seconds, fitted=True))
    return Table(
        "Korthikanti et al.",
        "arXiv:2205.05198, table 5: A100",
        "s",
        tuple(runs),
        "all eight rows: device.efficiency.product, half_width and node.delivered of the A100",
        0.05,
    )


def _sc21() -> Table:
    rows = (
        (24, 2304, 24, 1, 1, 32, 512, 137),
        (30, 3072, 32, 2, 1, 64, 512, 138),
        (36, 4096, 32, 4, 1, 128, 512, 142),
        (40, 6144, 48, 8, 1, 256, 1024, 135),
        (48, 8192, 64, 8, 2, 512, 1536, 138),
        (60, 10240, 80, 8, 4, 1024, 1792, 140),
        (80, 12288, 96, 8, 8, 1536, 2304, 148),
        (96, 16384, 128, 8, 16, 1920, 2160, 155),
        (105, 20480, 128, 8, 35, 2520, 2520, 163),
        (128, 25600, 160, 8, 64, 3072, 3072, 163),
    )
    runs = []
    for layers, width, heads, tp, pp, ranks, batch, published in rows:
        layout = Layout(
            tp=tp,
            pp=pp,
            dp=ranks // (tp * pp),
            schedule="1f1b" if pp > 1 else "none",
            recompute="block",
        ).with_batch(batch)
        shape = gpt(layers, width, heads)
        name = f"{shape.num_parameters / 1e9:.1f} billion, {layout}"
        software = replace(MEGATRON, gradient_bytes=2)
        runs.append(Run(name, shape, layout, published, software=software))
    return Table(
        "Narayanan et al.",
        "SC 2021, table 1: A100",
        "TFLOP/s, all that is computed",
        tuple(runs),
        "nothing: the table is blind",
        0.12,
        "one row in a micro-batch, 1f1b, gradients of fp16 added up in fp16",
    )


SIZES = {  # of MPT: width, layers, heads
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
# Model, tokens of a row, devices, rows of a micro-batch, micro-batches, recomputed, tokens/s.
A100_ROWS = (
    ("30b", 8192, 8, 1, 21, True, 574),
    ("30b", 4096, 8, 1, 21, True, 814),
    ("30b", 2048, 8, 3, 21, True, 916),
    ("13b", 32768, 8, 1, 3, True, 1016),
    ("13b", 8192, 8, 5, 3, True, 1795),
    ("13b", 4096, 8, 10, 3, True, 2060),
    ("13b", 2048, 8, 2, 3, False, 2262),
    ("13b", 1024, 8, 40, 3, True, 2330),
    ("7b", 65536, 8, 1, 2, True, 1013),
    ("7b", 16384, 8, 4, 2, True, 2453),
    ("7b", 4096, 8, 16, 2, True, 3684),
    ("7b", 2048, 8, 6, 2, False, 4641),
    ("7b", 1024, 8, 64, 2, True, 4357),
    ("3b", 32768, 8, 3, 6, True, 3029),
    ("3b", 8192, 8, 3, 6, False, 7695),
    ("3b", 2048, 8, 10, 2, False, 10811),
    ("3b", 512, 8, 40, 6, False, 12127),
    ("1b", 32768, 8, 1, 4, False, 6275),
    ("1b", 8192, 8, 3, 4, False, 13814),
    ("1b", 2048, 8, 14, 4, False, 20513),
    ("760m", 2048, 8, 24, 2, False, 32432),
    ("350m", 8192, 8, 8, 2, False, 36569),
    ("350m", 2048, 8, 32, 2, False, 58782),
    ("125m", 2048, 8, 32, 2, False, 141737),
)
H100_ROWS = (
    ("70b", 2048, 64, 8, 4, True, 1039),
    ("70b", 2048, 32, 2, 16, True, 882),
    ("30b", 8192, 8, 1, 21, True, 1384),
    ("30b", 4096, 8, 1, 21, True, 1802),
    ("30b", 2048, 32, 14, 3, True, 2308),
    ("30b", 2048, 16, 10, 3, True, 2263),
    ("30b", 2048, 8, 3, 21, True, 2002),
    ("13b", 16384, 8, 3, 3, True, 2985),
    ("13b", 4096, 8, 10, 3, True, 4717),
    ("13b", 2048, 64, 2, 1, False, 4800),
    ("13b", 2048, 8, 2, 1, False, 4792),
    ("13b", 1024, 8, 40, 3, True, 5502),
    ("7b", 65536, 8, 1, 2, True, 1956),
    ("7b", 32768, 8, 2, 2, True, 3318),
    ("7b", 8192, 8, 8, 2, True, 6935),
    ("7b", 4096, 8, 16, 2, True, 8611),
    ("7b", 2048, 8, 6, 1, False, 10643),
    ("3b", 16384, 8, 1, 6, False, 11152),
    ("3b", 4096, 8, 5, 6, False, 20964),
    ("3b", 2048, 64, 6, 3, False, 22525),
    ("3b", 2048, 16, 10, 3, False, 24142),
    ("3b", 512, 8, 40, 6, False, 27965),
    ("1b", 32768, 8, 1, 4, False, 12025),
    ("1b", 8192, 8, 3, 4, False, 29157),
    ("1b", 2048, 64, 20, 1, False, 44402),
    ("1b", 2048, 8, 14, 1, False, 45455),
    ("760m", 2048, 32, 24, 1, False, 67971),
    ("760m", 512, 8, 96, 2, False, 83749),
)


def _llm_foundry(cluster: str, rows: Sequence[tuple[str, int, int, int, int, bool, int]]) -> Table:
    runs = []
    for number, (name, tokens, ranks, micro, several, again, published) in enumerate(rows):
        width, layers, heads = SIZES[name]
        shape = ModelShape(
            num_layers=layers,
            dim=width,
            num_heads=heads,
            vocab_size=50368,
            sequence_length=tokens,
        )
        layout = Layout(
            dp=ranks,
            zero=3,
            micro_batch=micro,
            num_microbatches=several,
            recompute="block" if again else "none",
        )
        title = f"{name}, {tokens:,} tokens, {ranks} devices, {micro} x {several} rows"
        if again:
            title += ", recomputed"
        runs.append(Run(title, shape, layout, published, cluster, FSDP, fitted=number % 3 == 0))
    constants = (
        "device.efficiency.attention of the A100, and what FSDP moves between products"
        if cluster == "a100"
        else "device.efficiency.product and attention of the H100"
    )
    return Table(
        f"llm-foundry, {cluster.upper()}",
        "mosaicml/llm-foundry, scripts/train/benchmarking/README.md, commit 061f2c7, rows in bf16 "
        "under automatic mixed precision",
        "tokens/s",
        tuple(runs),
        f"every third row: {constants}",
        0.25,
    )


def _megatron_core() -> Table:
    """Megatron-core, Llama 3 and MegaScale."""
    big = gpt(96, 12288, 96, vocab=131072, sequence=4096)
    runs = []
    for ranks, pp, part in ((96, 4, 0.47), (4608, 8, 0.42)):
        layout = Layout(
            tp=8,
            pp=pp,
            dp=ranks // (8 * pp),
            zero=1,
            schedule="interleaved",
            stages_per_rank=6,
            sequence_parallel=True,
        ).with_batch(1152)
        name = f"Megatron-core, 175B, {ranks:,} H100"
        runs.append(Run(name, big, layout, part * 989, "h100", FLASH_2))
    for ranks, published in ((8192, 430.0), (16384, 400.0)):
        layout = Layout(
            tp=8,
            pp=16,
            dp=ranks // 128,
            zero=1,
            schedule="interleaved",
            stages_per_rank=8,
            sequence_parallel=True,
        ).with_batch(2048)
        shape = llama(126, 16384, 128, 53248)
        runs.append(Run(f"Llama 3 405B, {ranks:,} H100", shape, layout, published, "h100", FLASH_2))
    layout = Layout(
        tp=8,
        pp=8,
        dp=192,
        zero=1,
        schedule="interleaved",
        stages_per_rank=6,
        sequence_parallel=True,
    ).with_batch(6144)
    shape = gpt(96, 12288, 96, vocab=64000)
    runs.append(
        Run("MegaScale, 175B, 12,288 A100", shape, layout, 0.552 * 312, "a100", MEGATRON_CORE)
    )
    return Table(
        "Thousands of devices",
        "Megatron-LM, README.md, commit 0010ab7 (47 % of the peak on 96, 42 % on 4,608, 1,152 rows "
        "of 4,096 tokens); Grattafiori et al., arXiv:2407.21783 (16 million tokens a step); Jiang "
        "et al., MegaScale, NSDI 2024 (55.2 %)",
        "model TFLOP/s",
        tuple(runs),
        "nothing: the table is blind",
        0.20,
        f"{ASSUMED}; stages of a rank; of Megatron-core tp and pp; of MegaScale tp, pp, the batch, "
        "and blocks and attention of a GPT, which are others there",
    )


def _long_rows() -> Table:
    layout = Layout(
        tp=8,
        cp=16,
        pp=16,
        dp=8,
        zero=1,
        schedule="interleaved",
        stages_per_rank=8,
        sequence_parallel=True,
    ).with_batch(128)
    shape = replace(llama(126, 16384, 128, 53248), sequence_length=131072)
    name = "Llama 3 405B, 131,072 tokens, 16,384 H100"
    return Table(
        "Rows shared out over ranks",
        "Grattafiori et al., arXiv:2407.21783, table 4: context parallelism over 16 ranks",
        "model TFLOP/s",
        (Run(name, shape, layout, 380.0, "h100", FLASH_2),),
        "nothing: the table is blind",
        0.15,
        f"{ASSUMED}; stages of a rank; that masked scores count among the operations",
    )


def _torchtitan() -> Table:
    runs = []
    shape = llama(32, 4096, 32, 14336)
    for ranks, compiled, published in (
        (8, False, 5762),
        (8, True, 6667),
        (128, False, 5605),
        (128, True, 6514),
    ):
        layout = Layout(dp=ranks, zero=3, micro_batch=2)
        software = replace(FSDP, unfused=1.0) if compiled else FSDP
        name = f"Llama 3.1 8B, {ranks} devices{', compiled' if compiled else ''}"
        runs.append(Run(name, shape, layout, published, "h100", software))
    return Table(
        "torchtitan",
        "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, commit 31a17bf: H100 of "
        "500 W and 2.4 TB/s",
        "tokens/s",
        tuple(runs),
        "nothing: the table is blind",
        0.35,
        "nothing computed again, where torchtitan recomputes selectively; the H100 of the data "
        "sheet, 700 W and 3.35 TB/s",
    )


TABLES = {
    "korthikanti": _korthikanti(),
    "sc21": _sc21(),
    "foundry_a100": _llm_foundry("a100", A100_ROWS),
    "foundry_h100": _llm_foundry("h100", H100_ROWS),
    "thousands": _megatron_core(),
    "long_rows": _long_rows(),
    "torchtitan": _torchtitan(),
}


def fill(page: str) -> str:
    """The page with its tables made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{text(TABLES[found[2]])}\n{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
