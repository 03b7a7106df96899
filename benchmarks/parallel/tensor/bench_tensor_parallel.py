"""One step of a GPT whose layers 2 ranks share, one thread each, beside torch's DTensor parallelism
and one process alone.

The model of bench_data_parallel, its blocks shared out and embedding and head whole on each rank,
as torch's example does it. Both sides start from the same weights and see the same tokens. "one
process" takes the whole step on the first rank, while the other waits: half of its time is what two
ranks can reach at best. `beyond_half` is what each needs above that, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.instruments.harness import Case, Row
from benchmarks.instruments.ranks import measure_on_ranks
from benchmarks.parallel.data.bench_data_parallel import (
    HEADS,
    LAYERS,
    LENGTH,
    SIZE,
    VOCABULARY,
    WIDTH,
    Model,
    Trainer,
    check_losses,
)
from benchmarks.parallel.data.bench_data_parallel import Block as PlainBlock
from pyops.comm.collectives.communicator import Communicator
from pyops.flat import Placement
from pyops.optim import AdamW
from pyops.tensor_parallel import (
    AttentionConfig,
    LayerNorm,
    MLPConfig,
    ParallelAttention,
    ParallelMLP,
    sync_partial_grads,
)
from pyops.tensor_parallel.functional.regions import gather_tokens, scatter_tokens

__all__ = ["run"]

RATE = 1e-4


class Block(nn.Module):
    """PlainBlock of shared layers: x and what is to be added to it -> the same of the next
    block."""

    def __init__(self, **shared: Any) -> None:
        super().__init__()
        self.ln1, self.ln2 = LayerNorm(WIDTH, **shared), LayerNorm(WIDTH, **shared)
        self.attention = ParallelAttention(
            WIDTH, HEADS, AttentionConfig(causal=True, seed=None), **shared
        )
        self.mlp = ParallelMLP(WIDTH, 4 * WIDTH, MLPConfig(seed=None), **shared)

    def forward(self, x: Tensor, y: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        h, x = self.ln1(x, y)
        h, x = self.ln2(self.attention(h, shape=shape), x)
        return x, self.mlp(h)


class SharedModel(nn.Module):
    """Model with its blocks shared by the ranks, from its weights."""

    def __init__(self, whole: nn.Module, *, sequence_parallel: bool) -> None:
        super().__init__()
        assert isinstance(whole, Model)
        self.group, self.sequence_parallel = dist.group.WORLD, sequence_parallel
        self.tokens, self.positions, self.ln, self.head = (
            whole.tokens,
            whole.positions,
            whole.ln,
            whole.head,
        )
        shared = {"group": self.group, "sequence_parallel": sequence_parallel}
        self.blocks = nn.ModuleList(Block(**shared) for _ in range(LAYERS))
        for block, plain in zip(self.blocks, whole.blocks, strict=True):
            assert isinstance(plain, PlainBlock)
            tensors = shared_tensors(plain)
            placements = Placement.of(block)
            with torch.no_grad():
                for name, parameter in block.named_parameters():
                    parameter.copy_(placements[name].take(tensors[name]))

    def forward(self, tokens: Tensor) -> Tensor:
        B, T = tokens.shape
        x = self.tokens(tokens) + self.positions.weight
        if self.sequence_parallel:
            x = scatter_tokens(x.flatten(0, 1), group=self.group)
        y = torch.zeros_like(x)
        for block in self.blocks:
            x, y = block(x, y, (B, T))
        x = x + y
        if self.sequence_parallel:
            x = gather_tokens(x, tokens=B * T, duplicated=True, group=self.group).view(B, T, -1)
        return self.head(self.ln(x))


def shared_tensors(plain: PlainBlock) -> dict[str, Tensor]:
    """The whole tensors of a plain block under a shared one's names."""
    found: dict[str, nn.Module] = {
        "attention.output": plain.wo,
        "mlp.up": plain.up,
        "mlp.down": plain.down,
        "ln1": plain.ln1,
        "ln2": plain.ln2,
    }
    tensors: dict[str, Tensor] = {
        f"{name}.{key}": p for name, layer in found.items() for key, p in layer.named_parameters()
    }
    for key in ("weight", "bias"):
        three = [
            getattr(layer, key).view(HEADS, WIDTH // HEADS, -1)
            for layer in (plain.wq, plain.wk, plain.wv)
        ]
        rows = torch.stack(three, dim=1).flatten(0, 2)
        tensors[f"attention.qkv.{key}"] = rows if key == "weight" else rows.flatten()
    return tensors


class Shared(Trainer):
    """Our trainer: parts of gradients are summed before the step."""

    def __init__(self, batch: int, device: torch.device, *, sequence_parallel: bool) -> None:
        super().__init__(
            lambda whole: SharedModel(whole, sequence_parallel=sequence_parallel),
            lambda model: AdamW(model.parameters(), lr=RATE),
            batch,
            device,
        )
        self.batch = _same_batch(batch, device)
        step = self.optimizer.step

        def synced_step() -> None:
            sync_partial_grads(self.model, group=dist.group.WORLD)
            step()

        self.optimizer.step = synced_step  # type: ignore


def _same_batch(batch: int, device: torch.device) -> Tensor:
    return torch.randint(
        VOCABULARY, (batch, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    ).to(device)


def _dtensor(batch: int, device: torch.device) -> Trainer:
    mesh = init_device_mesh(device.type, (SIZE,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "wo": RowwiseParallel()}
    plan |= {name: ColwiseParallel() for name in ("wq", "wk", "wv")}

    def wrap(model: nn.Module) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            # Its view(batch, length, HEADS, -1) must see this rank's heads only.
            block.forward = partial(_local_heads, block)
            parallelize_module(block, mesh, plan)
        return model

    found = Trainer(
        wrap,
        lambda model: torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-2),
        batch,
        device,
    )
    found.batch = _same_batch(batch, device)
    return found


def _local_heads(self: PlainBlock, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    h = self.ln1(x)
    q, k, v = (
        w(h).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
        for w in (self.wq, self.wk, self.wv)
    )
    attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + self.wo(attended.transpose(1, 2).reshape(batch, length, -1))
    return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


class _OneProcess:
    """The whole step on the first rank; nothing on others."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.trainer = Trainer(
            lambda model: model, lambda model: AdamW(model.parameters(), lr=RATE), batch, device
        )
        self.trainer.batch = _same_batch(batch, device)

    def __call__(self) -> None:
        if dist.get_rank() == 0:
            self.trainer()


def _facts(ours: Shared) -> dict[str, Any]:
    """What a step sends, and what a rank holds."""
    ours()
    comm = Communicator.of()
    before = comm.sequence, comm.bytes_sent
    ours()
    held = sum(p.numel() for p in ours.model.parameters())
    return {
        "collectives": comm.sequence - before[0],
        "sent_bytes": comm.bytes_sent - before[1],
        "parameters_held": held,
    }


def _case(batch: int, sequence_parallel: bool, *, device: torch.device) -> Case:
    ours, peer = Shared(batch, device, sequence_parallel=sequence_parallel), _dtensor(batch, device)
    worst = check_losses(ours, peer)
    kind = ", sequence parallel" if sequence_parallel else ""
    facts = {"ranks": SIZE, "threads": torch.get_num_threads(), "tokens": batch * LENGTH}
    return Case(
        bench="tensor_parallel",
        name=f"GPT step, tp = {SIZE}{kind}, {batch} x {LENGTH} tokens",
        implementations={
            "pyops layers": ours,
            "torch DTensor": peer,
            "one process": _OneProcess(batch, device),
        },
        check=lambda: worst,
        device=device,
        targets={"torch DTensor": 1.5} if batch == 1 else {},
        facts={**facts, **_facts(ours)},
    )


def _cases(*, device: torch.device, options: Any) -> Iterator[Callable[[], Case]]:
    for batch in (1, 8):
        for sequence_parallel in (False, True):
            name = f"{batch} x {LENGTH}{' sequence' if sequence_parallel else ''}"
            if options.only is None or options.only in name:
                yield partial(_case, batch, sequence_parallel, device=device)


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    rows = measure_on_ranks(_cases, size=SIZE, options=options)
    for row in rows:
        half = row["us"]["one process"][1] / 2
        row["beyond_half_ms"] = {
            name: round((us[1] - half) / 1e3, 1)
            for name, us in row["us"].items()
            if name != "one process"
        }
        print(row["case"], "beyond half of one process, ms:", row["beyond_half_ms"])
    return rows
