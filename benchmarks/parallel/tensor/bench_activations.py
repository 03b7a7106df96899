"""What a transformer layer keeps for backward, counted, beside the formulas: alone, shared by
ranks, and recomputed.

    bytes per layer, 16-bit   s b h ( 8 + 24 / t) + 4 a s b / t + 16 s b
                              shared by t ranks; with sequence parallelism all of it over t
    Megatron                  s b h (10 + 24 / t + 5 a s / (h t) )                  34 where t = 1

A layer is a block of pyops.models.GPT in bfloat16, of a heads, with dropout; what autograd saves is
counted in storages, each once, without parameters. For b sequences of s tokens, width h.
docs/recompute.md derives the terms. Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, arXiv:2205.05198, section 4 and table 2.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from benchmarks.instruments import machine
from benchmarks.instruments.harness import Row
from benchmarks.instruments.storages import storages
from pyops import recompute
from pyops.models.gpt import GPT, GPTConfig

__all__ = ["SCHEMES", "Scheme", "Sizes", "measure", "run"]


@dataclass(frozen=True)
class Sizes:
    """b sequences of s tokens, width h, a heads."""

    b: int = 2
    s: int = 256
    h: int = 512
    a: int = 8


@dataclass(frozen=True)
class Scheme:
    """recomputed: names of modules within the block, "" for the block itself; ours, megatron:
    bytes, of sizes and t ranks."""

    ours: Callable[[Sizes, int], float]
    megatron: Callable[[Sizes, int], float] | None
    sequence_parallel: bool = False
    recomputed: tuple[str, ...] = ()
    partitioned: bool = False
    attention_dropout: bool = True


def _lse(z: Sizes) -> float:
    """The logarithm of the sum of each row of scores, in fp32, of which backward makes the
    attention weights again."""
    return 4 * z.a * z.s * z.b


def _rest(z: Sizes) -> float:
    """Mean and deviation of each token in both norms, in fp32."""
    return 16 * z.s * z.b


SCHEMES: dict[str, Scheme] = {
    "kept": Scheme(
        lambda z, t: z.s * z.b * z.h * (8 + 24 / t) + _lse(z) / t + _rest(z),
        lambda z, t: z.s * z.b * z.h * (10 + 24 / t) + 5 * z.a * z.s**2 * z.b / t,
    ),
    "kept, sequence parallel": Scheme(
        lambda z, t: (32 * z.s * z.b * z.h + _lse(z) + _rest(z)) / t,
        lambda z, t: (34 * z.s * z.b * z.h + 5 * z.a * z.s**2 * z.b) / t,
        sequence_parallel=True,
    ),
    "no dropout of attention": Scheme(
        lambda z, t: z.s * z.b * z.h * (8 + 24 / t) + _lse(z) / t + _rest(z), None,
        attention_dropout=False,
    ),
    "core of attention recomputed": Scheme(
        lambda z, t: z.s * z.b * z.h * (8 + 24 / t) + _rest(z),
        lambda z, t: z.s * z.b * z.h * (10 + 24 / t), recomputed=("attention.core",),
    ),
    "core of attention recomputed, sequence parallel": Scheme(
        lambda z, t: (32 * z.s * z.b * z.h + _rest(z)) / t,
        lambda z, t: 34 * z.s * z.b * z.h / t,
        sequence_parallel=True, recomputed=("attention.core",),
    ),
    "attention and MLP recomputed": Scheme(
        lambda z, t: 8 * z.s * z.b * z.h + _rest(z), None, recomputed=("attention", "mlp"),
    ),
    "block recomputed": Scheme(
        lambda z, t: 2 * z.s * z.b * z.h, lambda z, t: 2 * z.s * z.b * z.h, recomputed=("",),
    ),
    "block recomputed, sequence parallel": Scheme(
        lambda z, t: 2 * z.s * z.b * z.h / t, lambda z, t: 2 * z.s * z.b * z.h / t,
        sequence_parallel=True, recomputed=("",),
    ),
    "block recomputed, inputs split over ranks": Scheme(
        lambda z, t: 2 * z.s * z.b * z.h / t, lambda z, t: 2 * z.s * z.b * z.h / t,
        recomputed=("",), partitioned=True,
    ),
}  # fmt: skip


def measure(scheme: Scheme, sizes: Sizes, *, group: dist.ProcessGroup | None = None) -> int:
    """Bytes that a block's forward keeps for its backward on this rank."""
    sp = scheme.sequence_parallel
    p = 0.1 if scheme.attention_dropout else 0.0
    config = GPTConfig(
        vocab_size=8,
        sequence_length=sizes.s,
        num_layers=1,
        num_heads=sizes.a,
        dim=sizes.h,
        dropout=0.1,
        attention_dropout=p,
    )
    model = GPT(config, group=group, sequence_parallel=sp, dtype=torch.bfloat16)
    model.set_dropout((sizes.b, sizes.s), seed=1, step=0)
    ranks = 1 if group is None else dist.get_world_size(group)
    block, prefix = model.blocks[0], "blocks.0"
    names = [f"{prefix}.{name}" if name else prefix for name in scheme.recomputed]
    if names:
        recompute.apply(model, names, partition_group=group if scheme.partitioned else None)
    tokens = (-(-sizes.b * sizes.s // ranks),) if sp and ranks > 1 else (sizes.b, sizes.s)
    shape = (sizes.b, sizes.s) if sp else None

    def forward() -> Tensor:
        # Made here, as a layer before would, so that it stays only where it is kept.
        x = torch.zeros((), dtype=torch.bfloat16, requires_grad=True).expand(*tokens, sizes.h) + 0
        return block(x, shape)  # type: ignore[no-any-return]

    if scheme.partitioned and ranks > 1:
        return _grown(forward)
    return _saved(
        forward, {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    )


def _saved(forward: Callable[[], Tensor], own: set[int]) -> int:
    """Bytes of the storages that autograd refers to."""
    kept: dict[int, Tensor] = {}  # which holds them, so that no address is given twice

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward()
    assert y.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _grown(forward: Callable[[], Tensor]) -> int:
    """Bytes of the tensors that there are after forward beside those of before and the result: for
    inputs kept as copies.

    Floating-point ones: torch's checkpoint also keeps the random state of each call, 5 KB.
    """
    forward()  # buffers of collectives stay
    before = storages(floating_point=True)
    y = forward()
    gone = {y.untyped_storage().data_ptr()}
    return sum(
        n
        for at, n in storages(floating_point=True).items()
        if at not in gone and before.get(at) != n
    )


def _serve(rank: int, size: int, port: int, names: list[str], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}"
    )
    for name in names:
        results.put((name, measure(SCHEMES[name], Sizes(), group=dist.group.WORLD)))
        dist.barrier()
    dist.destroy_process_group()


def _on_ranks(size: int, names: list[str]) -> dict[str, list[int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_serve, (size, port, names, results), nprocs=size)
    found: dict[str, list[int]] = {name: [] for name in names}
    while not results.empty():
        name, kept = results.get()
        found[name].append(kept)
    return found


def _rows(options: Any) -> Iterator[Row]:
    sizes = Sizes()
    unit = sizes.s * sizes.b * sizes.h
    for size in (1, 2, 4):
        shared = {
            n: each
            for n, each in SCHEMES.items()
            if size > 1 or not (each.sequence_parallel or each.partitioned)
        }
        cases = {name: f"{name}, {size} rank" + ("s" if size > 1 else "") for name in shared}
        names = [
            name for name, case in cases.items() if options.only is None or options.only in case
        ]
        for name, ranks in (_on_ranks(size, names) if names else {}).items():
            scheme = SCHEMES[name]
            kept = max(ranks)
            theirs = (
                None if scheme.megatron is None else round(scheme.megatron(sizes, size) / unit, 3)
            )
            yield {
                "bench": "activations",
                "case": cases[name],
                "device": "cpu",
                "us": {},
                "speedup": {},
                "max_error": None,
                "rounds": 1,
                "ranks": size,
                "sizes": vars(sizes),
                "kept_bytes": kept,
                "kept_sbh": round(kept / unit, 3),
                "formula_sbh": round(scheme.ours(sizes, size) / unit, 3),
                "megatron_sbh": theirs,
                "machine": {**machine.describe(torch.device("cpu")), "threads": 1},
                "versions": machine.versions(),
                "commit": machine.commit(),
                "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            }


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    found = []
    for row in _rows(options):
        theirs = "" if row["megatron_sbh"] is None else f", Megatron's {row['megatron_sbh']:6.3f}"
        print(
            f"{row['case']:<58} keeps {row['kept_sbh']:6.3f} sbh (formula "
            f"{row['formula_sbh']:6.3f}{theirs})",
            flush=True,
        )
        found.append(row)
    return found
