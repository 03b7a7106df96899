"""OneBitAdam at stage 1: the bits of all ranks played in one process, what travels, what is kept,
and going on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pyops.optim
from pyops import checkpoint
from pyops.comm.compression.one_bit import OneBit
from pyops.onebit import OneBitConfig
from pyops.zero import ZeroConfig, ZeroOptimizer
from pyops.zero.layout.partition import Partition
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
        (2, torch.float32, "mean", 0.0),
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


class Wide(nn.Module):
    """Enough parameters that what is sent besides bits does not count; one element never has a
    gradient."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.last = nn.Linear(width, 1)
        for p in self.parameters():
            p.data.normal_(0.0, width**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


def _wide_loss(model: nn.Module, step: int, rank: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(48, 192, generator=generator).mul_(torch.arange(192) != 5)
    y = torch.sin(3 * x[:, :8].sum(1, keepdim=True))
    x, y = x.chunk(size)[rank], y.chunk(size)[rank]
    return nn.functional.mse_loss(model(x), y)


def _trained(rank: int, group: Any, name: str, steps: int) -> dict[str, Any]:
    model, size = Wide(), dist.get_world_size(group)
    options = (
        {"config": OneBitConfig(warmup_steps=10)} if name == "OneBitAdam" else {"weight_decay": 0.0}
    )
    zero = zero_optimizer(
        model,
        getattr(pyops.optim, name),
        stage=1,
        max_grad_norm=1.0,
        group=group,
        lr=2e-3,
        **options,
    )
    assert zero.communicator is not None
    sent, losses, norms = [], [], []
    before = model.layers[0].weight[:, 5].clone()
    for step in range(steps):
        at = zero.communicator.bytes_sent
        loss = _wide_loss(model, step, rank, size)
        loss.backward()
        zero.step()
        losses.append(float(loss.detach()))
        sent.append(zero.communicator.bytes_sent - at)
        assert zero.grad_norm is not None
        norms.append(float(zero.grad_norm))
    return {
        "losses": losses,
        "sent": sent[-1],
        "norms": norms,
        "memory": zero.memory(),
        "numel": sum(p.numel() for p in model.parameters()),
        "still": torch.equal(before, model.layers[0].weight[:, 5]),
        "parameters": [p.detach().clone() for p in model.parameters()],
    }


def test_it_learns_as_adam_does_and_sends_a_sixteenth_of_sixteen_bits(world):
    exact, ours = (world(2).run(_trained, name, 80) for name in ("AdamW", "OneBitAdam"))
    end = [sum(sum(rank["losses"][-20:]) for rank in ranks) for ranks in (exact, ours)]
    begin = sum(sum(rank["losses"][:10]) for rank in exact) * 2
    assert end[0] < 0.8 * begin
    assert end[1] < end[0] + 0.15 * (begin - end[0]), "most of what exact Adam learns"
    assert ours[0]["losses"][:10] == exact[0]["losses"][:10], "the warm-up is AdamW"
    assert ours[0]["losses"][12:] != exact[0]["losses"][12:]
    first, second = ours
    assert all(
        torch.equal(a, b) for a, b in zip(first["parameters"], second["parameters"], strict=True)
    )
    assert first["still"], "no variance, no step"
    assert first["norms"] == second["norms"]
    # A bit per element each way, of which half stays with its owner, beside 4 bytes each way.
    assert first["sent"] < exact[0]["sent"] / 28
    # 2 bytes of roots and 4 of errors, whole; v, w, p and two buffers of 4 bytes, shared out by 2.
    assert first["memory"]["states"] == pytest.approx((6 + 20 / 2) * first["numel"], rel=0.05)


def _skipped(rank: int, group: Any) -> list[bool]:
    """Whether anything changed in a step in which rank 1 alone had an inf; and in the next."""
    model = Wide()
    zero = ZeroOptimizer(
        model,
        pyops.optim.OneBitAdam,
        ZeroConfig(stage=1),
        group=group,
        lr=1e-3,
        config=OneBitConfig(warmup_steps=1),
    )
    assert zero.one_bit is not None
    changed = []
    for step, factor in enumerate((1.0, 1.0, float("inf") if rank else 1.0, 1.0)):
        everything = [
            *model.parameters(),
            *(t for each in zero.one_bit._shared for t in (each.w, each.p, each.errors.worker)),
        ]
        before = [t.detach().clone() for t in everything]
        (_wide_loss(model, step, rank, 2) * factor).backward()
        zero.step()
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, everything, strict=True)))
    return changed


def test_an_inf_on_one_rank_changes_nothing_on_any(world):
    assert world(2).run(_skipped) == [[True, True, False, True]] * 2


def _resumed(rank: int, group: Any, folder: str, saved_at: int, alone: bool) -> bool:
    """Saved in the middle, and gone on with; alone: by one rank."""

    def make() -> tuple[Wide, ZeroOptimizer]:
        model = Wide()
        mine = dist.new_subgroups(1)[0] if again and alone else group
        return model, ZeroOptimizer(
            model,
            pyops.optim.OneBitAdam,
            ZeroConfig(stage=1),
            group=mine,
            lr=1e-3,
            config=OneBitConfig(warmup_steps=4),
        )

    def steps(model: nn.Module, zero: ZeroOptimizer, numbers: range) -> list[float]:
        losses = []
        for step in numbers:
            loss = _wide_loss(model, step, rank, 2)
            loss.backward()
            zero.step()
            losses.append(float(loss.detach()))
        return losses

    again = False
    model, zero = make()
    steps(model, zero, range(saved_at))
    checkpoint.save(
        folder, {"model": zero.model_state_dict(), "optimizer": zero.state_dict()}, group=group
    )
    expected = steps(model, zero, range(saved_at, saved_at + 5))
    again = True
    other, resumed = make()
    state, _ = checkpoint.load(folder, group=group)
    resumed.load_model_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    found = steps(other, resumed, range(saved_at, saved_at + 5))
    if alone:  # with half of the batch
        assert resumed.one_bit is not None
        return (
            resumed.one_bit.steps == saved_at + 5
            and found[0] == expected[0]
            and max(found) < 2 * max(expected)
        )
    return found == expected and all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize(("saved_at", "alone"), [(3, False), (7, False), (7, True)])
def test_goes_on_from_a_checkpoint(world, tmp_path: Path, saved_at: int, alone: bool):
    assert world(2).run(_resumed, str(tmp_path / "saved"), saved_at, alone) == [True, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 2}, "stage=1"),
        ({"offload": "cpu"}, "offload"),
        ({"config": OneBitConfig(warmup_steps=2, precondition=False)}, "precondition"),
        ({"config": OneBitConfig(warmup_steps=0)}, "warmup_steps"),
        ({"config": OneBitConfig(warmup_steps=2, compat="deepspeed")}, "compat"),
        ({"config": OneBitConfig(warmup_steps=2, reduction="sum")}, "reduction"),
    ],
)
def test_refused(options: dict[str, Any], words: str):
    given = {"stage": 1, "config": OneBitConfig(warmup_steps=2)} | options
    with pytest.raises(ValueError, match=words):
        zero_optimizer(Wide(), pyops.optim.OneBitAdam, **given)
    with pytest.raises(ValueError, match="ZeroOneAdam"):
        ZeroOptimizer(Wide(), pyops.optim.ZeroOneAdam, ZeroConfig(stage=1))


def _stepped(cls: Any, steps: int, **options: Any) -> tuple[Wide, ZeroOptimizer]:
    model = Wide()
    zero = zero_optimizer(model, cls, stage=1, lr=1e-3, **options)
    for step in range(steps):
        _wide_loss(model, step, 0, 1).backward()
        zero.step()
    return model, zero


def test_states_of_other_phases():
    """A compressed one is nothing for AdamW, or for another codec; AdamW's begins a warm-up where
    it was."""
    _, ours = _stepped(pyops.optim.OneBitAdam, 3, config=OneBitConfig(warmup_steps=2))
    _, exact = _stepped(pyops.optim.AdamW, 3, weight_decay=0.0)
    _, other = _stepped(pyops.optim.OneBitAdam, 0, config=OneBitConfig(warmup_steps=5, codec=CODEC))
    for zero, words in ((exact, "OneBitAdam"), (other, "codec")):
        before = zero.state_dict()
        with pytest.raises(ValueError, match=words):
            zero.load_state_dict(ours.state_dict())
        assert zero.state_dict()["state"].keys() == before["state"].keys()
    other.load_state_dict(exact.state_dict())
    assert other.one_bit is not None
    assert (other.one_bit.steps, other.one_bit.phase) == (3, "warmup")


def test_a_scaled_loss_is_unscaled_in_both_phases():
    _, plain = _stepped(
        pyops.optim.OneBitAdam,
        0,
        config=OneBitConfig(warmup_steps=2),
        precision="bf16",
        max_grad_norm=1.0,
    )
    _, scaled = _stepped(
        pyops.optim.OneBitAdam,
        0,
        config=OneBitConfig(warmup_steps=2),
        precision="bf16",
        max_grad_norm=1.0,
    )
    scaled.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 192, generator=generator).bfloat16()
        for zero, factor in ((plain, 1.0), (scaled, 1024.0)):
            (zero.model(x).square().mean() * factor).backward()
            zero.step()
        assert plain.grad_norm == scaled.grad_norm
    assert all(
        torch.equal(p, q)
        for p, q in zip(plain.model.parameters(), scaled.model.parameters(), strict=True)
    )
    assert not torch.equal(plain.model.last.weight, Wide().bfloat16().last.weight)
