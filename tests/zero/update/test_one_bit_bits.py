"""OneBitAdam at stage 1: the bits of all ranks, played in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pyops.optim
from pyops.comm.compression.one_bit import OneBit
from pyops.onebit import OneBitConfig
from pyops.zero import ZeroOptimizer
from pyops.zero.layout.partition import Partition
from tests.grids import full
from tests.zero.making import zero_optimizer
from tests.zero.models import Net, groups, mean_loss, part

pytestmark = pytest.mark.on_device

WARMUP, STEPS, LR, BUCKET = 3, 9, 1e-2, 2000
CODEC = OneBit(block=64)


def _net(dtype: torch.dtype) -> Net:
    """A column of a matrix that decays never has a gradient."""
    model = Net(mixed=False).to(dtype)
    model.blocks[0].inner.weight.register_hook(
        lambda g: g.index_fill(1, torch.tensor([2], device=g.device), 0.0)
    )
    return model


def _gradients(model: Net, step: int, rank: int, size: int, dtype: torch.dtype) -> None:
    x, y = part(step, rank, size)
    mean_loss(model, x.to(dtype), y.to(dtype), sometimes=step % 2 == 1).backward()


def _make(
    model: Net, group: Any, *, frozen_beta2: float | None = None, **options: Any
) -> ZeroOptimizer:
    return zero_optimizer(
        model,
        pyops.optim.OneBitAdam,
        stage=1,
        bucket_bytes=BUCKET,
        group=group,
        params=groups(model),
        lr=LR,
        weight_decay=0.1,
        config=OneBitConfig(warmup_steps=WARMUP, codec=CODEC, frozen_beta2=frozen_beta2),
        **options,
    )


def _run(
    rank: int, group: Any, dtype: torch.dtype, options: dict[str, Any]
) -> list[dict[str, Tensor]]:
    """Parameters after each step."""
    model = _net(dtype)
    zero, found = _make(model, group, **options), []
    for step in range(STEPS):
        _gradients(model, step, rank, dist.get_world_size(group), dtype)
        zero.step()
        found.append({n: p.detach().clone() for n, p in model.named_parameters()})
        assert zero.one_bit is not None
        assert zero.one_bit.compressed == (step + 1 >= WARMUP)
    return found


class Played:
    """All ranks of the algorithm in one process. Whole tensors; the codec's own functions; nothing
    of ZeroOptimizer."""

    def __init__(self, ranks: int, dtype: torch.dtype, *, op: str, slow: float) -> None:
        self.model, self.ranks, self.dtype, self.op, self.slow = _net(dtype), ranks, dtype, op, slow
        self.named = [
            (n, p) for n, p in reversed(list(self.model.named_parameters())) if p.requires_grad
        ]
        self.optimizer = pyops.optim.AdamW(
            groups(self.model), lr=LR, weight_decay=0.1, master_weights=True
        )
        shapes = [(n, p.shape) for n, p in self.named]
        self.partition = Partition.plan(
            shapes, ranks=ranks, item_size=dtype.itemsize, bucket_bytes=BUCKET
        )
        self.squares: dict[Tensor, Tensor] = {}

    def zeros(self) -> Tensor:
        return torch.zeros(self.partition.layout.numel)

    def flat(self, tensors: list[Tensor | None]) -> Tensor:
        out = self.zeros()
        for i, t in enumerate(tensors):
            if t is not None:
                out[self.partition.layout.slice_at(i)] = t.detach().reshape(-1).float()
        return out

    def by_rank(self, step: int) -> list[list[Tensor | None]]:
        found = []
        for rank in range(self.ranks):
            self.model.zero_grad()
            _gradients(self.model, step, rank, self.ranks, self.dtype)
            found.append([None if p.grad is None else p.grad.clone() for _, p in self.named])
        return found

    def warm_up(self, step: int) -> None:
        for (_, p), *each in zip(self.named, *self.by_rank(step), strict=True):
            if all(g is None for g in each):
                p.grad = None
                continue
            total = torch.zeros(p.shape)
            for g in each:
                total += 0 if g is None else g.float()
            p.grad = (total * (1 / self.ranks if self.op == "mean" else 1)).to(self.dtype)
        gradients = {p: p.grad for _, p in self.named if p.grad is not None}
        self.optimizer.step()
        for p, g in gradients.items():
            if p not in self.squares:
                state = self.optimizer.state[p]
                began, step_of = state["exp_avg_sq"], float(state["step"])
                self.squares[p] = began * ((1 - self.slow ** (step_of - 1)) / (1 - 0.999**step_of))
            self.squares[p].mul_(self.slow).add_(g.float().square(), alpha=1 - self.slow)

    def switch(self) -> None:
        states = [self.optimizer.state.get(p, {}) for _, p in self.named]
        steps = [float(s["step"]) if s else 0.0 for s in states]
        v: list[Tensor | None] = []
        for (_, p), s, step in zip(self.named, states, steps, strict=True):
            if self.slow > 0.999 and s:
                v.append(self.squares[p] / (1 - self.slow**step))
            else:
                v.append(s["exp_avg_sq"] / (1 - 0.999**step) if s else None)
        flat_v = self.flat(v)
        self.roots = torch.where(flat_v == 0, 0.0, 1 / (flat_v.sqrt() + 1e-8)).bfloat16().float()
        self.w = (
            self.flat(
                [
                    s["exp_avg"] / (1 - 0.9**n) if s else None
                    for s, n in zip(states, steps, strict=True)
                ]
            )
            * self.roots
        )
        self.p = self.flat(
            [s.get("master", p) if s else p for s, (_, p) in zip(states, self.named, strict=True)]
        )
        self.q = self.flat([p for _, p in self.named])
        self.errors = [self.zeros() for _ in range(self.ranks)]
        self.steps = steps

    def chunks(self) -> Iterator[tuple[int, slice]]:
        for number in range(len(self.partition.buckets)):
            for rank in range(self.ranks):
                yield rank, self.partition.chunk(number, rank)

    def compressed(self, step: int) -> None:
        dead, mean = self.roots == 0, self.zeros()
        sent = [
            self.flat(each) * self.roots * (self.ranks if self.op == "sum" else 1)
            for each in self.by_rank(step)
        ]
        for _, chunk in self.chunks():
            payloads = []
            for u, error in zip(sent, self.errors, strict=True):
                payloads.append(
                    torch.zeros(CODEC.payload_bytes(chunk.stop - chunk.start), dtype=torch.uint8)
                )
                CODEC.encode(u[chunk], payloads[-1], error=error[chunk])
            CODEC.sum_rows(mean[chunk], payloads, scale=1 / self.ranks)
        mean[dead] = 0
        for error in self.errors:
            error[dead] = 0
        before = self.p.clone()
        for i, (_, p) in enumerate(self.named):
            if not self.steps[i]:
                continue
            self.steps[i] += 1
            at = self.partition.layout.slice_at(i)
            group = next(
                g for g in self.optimizer.param_groups if any(p is each for each in g["params"])
            )
            self.w[at].lerp_(mean[at], (1 - 0.9) / (1 - 0.9 ** self.steps[i]))
            self.p[at].mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                self.w[at], alpha=group["lr"]
            )
        self.p = torch.where(dead, before, self.p)
        moves = self.zeros()
        for _, chunk in self.chunks():
            payload = torch.zeros(CODEC.payload_bytes(chunk.stop - chunk.start), dtype=torch.uint8)
            CODEC.encode(self.p[chunk] - self.q[chunk], payload)
            CODEC.decode(payload, moves[chunk])
        self.q = (self.q + torch.where(dead, 0.0, moves)).to(self.dtype).float()
        with torch.no_grad():
            for i, (_, p) in enumerate(self.named):
                p.copy_(self.q[self.partition.layout.slice_at(i)].view(p.shape))


def _played(ranks: int, dtype: torch.dtype, *, op: str, slow: float) -> list[dict[str, Tensor]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks
    played, found = Played(ranks, dtype, op=op, slow=slow), []
    for step in range(STEPS):
        (played.warm_up if step < WARMUP else played.compressed)(step)
        if step + 1 == WARMUP:
            played.switch()
        found.append({n: p.detach().clone() for n, p in played.model.named_parameters()})
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize(
    ("size", "dtype", "op", "slow"),
    [
        full(2, torch.float32, "mean", 0.0),
        (3, torch.float32, "sum", 0.0),
        (2, torch.bfloat16, "mean", 0.9995),
    ],
)
def test_the_bits_of_all_ranks_in_one_process(
    world, size: int, dtype: torch.dtype, op: str, slow: float
):
    expected = _played(size, dtype, op=op, slow=slow)
    for found in world(size).run(_run, dtype, {"reduction": op, "frozen_beta2": slow}):
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert [n for n, p in theirs.items() if not torch.equal(ours[n], p)] == [], (
                f"step {step}"
            )
    start = dict(Net(mixed=False).to(dtype).named_parameters())
    assert torch.equal(expected[-1]["never.weight"], start["never.weight"])
    last, before = (each["blocks.0.inner.weight"] for each in expected[:-3:-1])
    assert torch.equal(last[:, 2], before[:, 2]), "no variance, no step"
    assert not torch.equal(last[:, 3], before[:, 3])
