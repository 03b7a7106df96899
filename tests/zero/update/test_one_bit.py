"""OneBitAdam at stage 1: what travels, what is kept, and going on from a checkpoint."""

from __future__ import annotations

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
from tests.zero.making import zero_optimizer

pytestmark = pytest.mark.on_device

CODEC = OneBit(block=64)


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
