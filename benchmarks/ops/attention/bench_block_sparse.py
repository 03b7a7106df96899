"""Block-sparse attention beside torch's attention with the same mask, and, forward, beside compiled
FlexAttention; and as more and more blocks are visited.

Every case is B = 1, eight heads of 64 in fp32 (bf16 on a GPU), causal, in blocks of 64. What a
perfect skip of tiles would reach beside torch, which computes all, is 1 / density; 0.45 of it is
the aim, as compiled FlexAttention reaches 0.42 forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.instruments.rivals import compiled
from benchmarks.ops.attention.bench_attention import (
    Step,
    Work,
    agree,
    attention_case,
    our_step,
    torch_attention,
)
from pyops.attention import (
    BigBird,
    Dense,
    Fixed,
    Longformer,
    Pattern,
    SlidingWindow,
    Variable,
)
from pyops.ops.attention import AttentionMask, BlockLayout

__all__ = ["PATTERNS", "cases", "density_cases", "run"]

BLOCK, HEADS, WINDOW = 64, 8, 256
SWEPT, WIDTHS = 4096, (1, 3, 7, 15, 31, 63, 127)  # tokens, and windows in blocks, of density_cases
PATTERNS: dict[str, Pattern] = {
    "dense": Dense(),
    "fixed": Fixed(num_local_blocks=8),
    "variable": Variable(local_window_blocks=(4, 8), global_block_indices=(0,)),
    "BigBird": BigBird(num_random_blocks=2, num_sliding_window_blocks=5),
    "Longformer": Longformer(num_sliding_window_blocks=9),
    f"window of {WINDOW}": SlidingWindow(num_sliding_window_blocks=2 * (WINDOW // BLOCK) + 1),
}


def layout_of(pattern: Pattern, tokens: int, device: torch.device) -> BlockLayout:
    return pattern.layout(tokens, heads=HEADS, block=BLOCK, causal=True).to(device)


def flex_step(work: Work, layout: BlockLayout) -> Step:
    """torch's FlexAttention, compiled, over the same blocks."""
    from torch.nn.attention.flex_attention import flex_attention

    blocks, call = layout.to_block_mask(), compiled(flex_attention)
    return torch_attention(work, lambda q, k, v: call(q, k, v, block_mask=blocks))


def sparse_case(
    name: str, pattern: Pattern, tokens: int, *, backward: bool, device: torch.device
) -> Case:
    """Ours beside torch's SDPA with the mask of the same tokens, and FlexAttention, which has a
    backward on a GPU alone."""
    layout = layout_of(pattern, tokens, device)
    seen = layout.tokens().to(device)[None]
    work = Work(
        tokens,
        HEADS,
        torch.bfloat16 if device.type == "cuda" else torch.float32,
        device,
        {"mask": AttentionMask(layout=layout)},
        {"attn_mask": seen},
        backward=backward,
    )
    with_flex = not backward or device.type == "cuda"
    rivals: dict[str, Callable[[], Step]] = (
        {"compiled FlexAttention": partial(flex_step, work, layout)} if with_flex else {}
    )
    targets = {"torch SDPA": round(0.45 / layout.density, 2)} if backward else {}
    if with_flex:
        targets["compiled FlexAttention"] = 0.9
    facts = {"density": round(layout.density, 4)}
    return attention_case(
        name, work, bench="block_sparse", rivals=rivals, targets=targets, facts=facts
    )


def window_case(name: str, tokens: int, *, device: torch.device) -> Case:
    """A window to the token, which needs no layout, beside a mask of FlexAttention's own making."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    place = torch.arange(tokens, device=device)
    away = place[:, None] - place
    work = Work(
        tokens,
        HEADS,
        torch.bfloat16 if device.type == "cuda" else torch.float32,
        device,
        {"mask": AttentionMask(causal=True, window=(WINDOW, None))},
        {"attn_mask": (away >= 0) & (away <= WINDOW)},
        backward=False,
    )

    def flex() -> Step:
        def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q - k <= WINDOW)

        start = time.perf_counter()
        blocks = create_block_mask(near, None, None, tokens, tokens, device=device.type)
        took["block_mask_ms"] = round(1e3 * (time.perf_counter() - start), 1)
        call = compiled(flex_attention)
        return torch_attention(work, lambda q, k, v: call(q, k, v, block_mask=blocks))

    took: dict[str, float] = {}
    return attention_case(
        name,
        work,
        bench="block_sparse",
        rivals={"compiled FlexAttention": flex},
        targets={"compiled FlexAttention": 0.9},
        observe=lambda row: took,
    )


def density_case(name: str, width: int, *, device: torch.device) -> Case:
    """A causal window of so many blocks beside causal attention without a pattern, ours and
    torch's, which compute something else: what leaving blocks out saves."""
    pattern = SlidingWindow(num_sliding_window_blocks=width)
    layout = layout_of(pattern, SWEPT, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    of = partial(Work, SWEPT, HEADS, dtype, device)
    causal = of({"mask": AttentionMask(causal=True)}, {"is_causal": True})
    masked = of(
        {"mask": AttentionMask(layout=layout)}, {"attn_mask": layout.tokens().to(device)[None]}
    )
    ours = our_step(masked)
    whole = layout_of(Dense(), SWEPT, device).density
    return Case(
        "sparse_density",
        name,
        {
            "pyops": ours,
            "pyops, every block": our_step(causal),
            "torch SDPA, causal": torch_attention(causal),
        },
        check=lambda: agree(ours, torch_attention(masked), dtype),
        device=device,
        facts={"density": round(layout.density, 4), "part_of_causal": layout.density / whole},
    )


def density_cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Windows of more and more blocks."""
    for width in WIDTHS:
        name = f"causal window of {width} blocks, T = {SWEPT}, forward + backward"
        yield name, partial(density_case, name, width, device=device)


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    name = f"a window of {WINDOW} tokens, T = 8192, forward"
    yield name, partial(window_case, name, 8192, device=device)
    for what, pattern in PATTERNS.items():
        for tokens, backward in ((4096, True), (8192, False), (8192, True)):
            name = f"{what}, T = {tokens}, forward{' + backward' if backward else ''}"
            yield (
                name,
                partial(sparse_case, name, pattern, tokens, backward=backward, device=device),
            )


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`; a call of torch's takes up to half a minute on
    a CPU."""
    made = [*cases(options.device), *density_cases(options.device)]
    chosen = [make for name, make in made if (options.only or "") in name]
    return run_cases(chosen, rounds=min(options.rounds, 5))
