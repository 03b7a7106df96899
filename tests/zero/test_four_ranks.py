"""Four ranks: of small parameters some ranks own nothing, of the batch each has another share, and
one alone may overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pyops.optim
from pyops.precision import LossScaler
from tests.grids import full
from tests.zero.making import zero_optimizer
from tests.zero.models import ROWS, Net, groups, mean_loss, rows

pytestmark = pytest.mark.on_device

SHARES = (1, 5, 7, 11)  # rows of each rank; together those of one process
STEPS = 6
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
Parameters = dict[str, Tensor]


class Uneven(nn.Module):
    """Sizes beside the multiples of 64 that ranks and buckets are cut at, a scalar, and nothing at
    all."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(10, n) for n in (1, 13, 26, 257))
        self.back = nn.ModuleList(nn.Linear(n, 10, bias=n != 26) for n in (1, 13, 26, 257))
        self.scale = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.zeros(0))
        for p in self.parameters():
            p.data.normal_(0.0, 0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for there, back in zip(self.blocks, self.back, strict=True):
            x = x + back(torch.tanh(there(x)))
        return x * self.scale


def _mine(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x, y = rows(step)
    start = sum(SHARES[:rank])
    return x[start : start + SHARES[rank]], y[start : start + SHARES[rank]]


def _limit(name: str) -> float | None:
    """SGD shows whether gradients have the right size; the others hardly do."""
    return None if name == "SGD" else 0.5


def _train(
    rank: int, group: Any, stage: int, name: str, bucket_bytes: int
) -> tuple[Parameters, int]:
    """(parameters after a few steps, how many pieces this rank has)"""
    model = Uneven(seed=rank)
    cls = getattr(
        torch.optim if name.startswith("torch.") else pyops.optim, name.removeprefix("torch.")
    )
    zero = zero_optimizer(
        model,
        cls,
        stage=stage,
        reduction="sum",
        bucket_bytes=bucket_bytes,
        max_grad_norm=_limit(name),
        group=group,
        **OPTIONS,
    )
    for step in range(STEPS):
        x, y = _mine(step, rank)
        ((model(x) - y).square().sum() / (ROWS * 10)).backward()
        zero.step()
    with zero.whole_parameters():
        pieces = [each for each in zero.owned.all_pieces() if each.piece.numel]
        return {n: p.detach().clone() for n, p in model.named_parameters()}, len(pieces)


@pytest.mark.parametrize(
    ("name", "bucket_bytes", "stages"),
    [
        full("SGD", 1, (1, 2, 3)),
        ("AdamW", 3000, (1, 3)),
        full("AdamW", 3000, (2,)),
        full("LAMB", 1 << 20, (1, 2, 3)),
        full("Adafactor", 3000, (2,)),  # and at 3 in test_stages, on three ranks
        full("Adafactor", 3000, (1, 3)),
    ],
)
def test_uneven_sizes_and_shares_equal_one_process(
    world, name: str, bucket_bytes: int, stages: tuple[int, ...]
):
    model = Uneven()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    cls = getattr(
        torch.optim if name.startswith("torch.") else pyops.optim, name.removeprefix("torch.")
    )
    plain = cls([p for p in model.parameters() if p.numel()], **OPTIONS)
    for step in range(STEPS):
        x, y = rows(step)
        plain.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if (limit := _limit(name)) is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.numel()], limit)
        plain.step()
    for stage in stages:
        found = world(4).run(_train, stage, name, bucket_bytes)
        assert len({pieces for _, pieces in found}) > 1, "every rank has a part of everything"
        for rank, (parameters, _) in enumerate(found):
            for n, p in model.named_parameters():
                assert torch.equal(parameters[n], found[0][0][n]), (stage, rank, n)
                torch.testing.assert_close(
                    parameters[n], p.detach(), rtol=1e-4, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}"
                )
                assert not p.numel() or float((p.detach() - start[n]).abs().max()) > 1e-3


OVERFLOWS = (1, 2, 5)  # steps in which rank 3 alone has an inf, in one element
TRAINED = 9
SCALES = [
    2.0**12,
    2.0**12,
    2.0**11,
    2.0**10,
    2.0**10,
    2.0**11,
    2.0**10,
    2.0**10,
    2.0**11,
]  # before each step


def _part(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    return tuple(t.chunk(size)[rank] for t in rows(step))  # type: ignore[return-value]


def _scaled(
    rank: int, group: Any, stage: int, name: str, dtype: torch.dtype
) -> tuple[list[float], list[bool], Any]:
    """(scales, whether steps were taken, parameters)"""
    size = dist.get_world_size(group)
    model = Net(seed=rank, mixed=False).to(dtype)
    cls = getattr(
        torch.optim if name.startswith("torch.") else pyops.optim, name.removeprefix("torch.")
    )
    zero = zero_optimizer(
        model,
        cls,
        stage=stage,
        bucket_bytes=2000,
        max_grad_norm=1.0,
        group=group,
        params=groups(model),
        **OPTIONS,
    )
    scaler = LossScaler(group=group, initial=2.0**12, window=2, hysteresis=1)
    scales, taken, hurt = [], [], [False]

    def overflow(gradient: Tensor) -> Tensor:  # of one element, which one rank owns
        changed = gradient.clone()
        changed[0, 0] = float("inf") if hurt[0] else changed[0, 0]
        return changed

    model.blocks[1].inner.weight.register_hook(overflow)
    for step in range(TRAINED):
        x, y = (t.to(dtype) for t in _part(step, rank, size))
        scales.append(scaler.get_scale())
        hurt[:] = [step in OVERFLOWS and rank == 3]
        scaler.scale(mean_loss(model, x, y, sometimes=step % 2 == 0).float()).backward()
        scaler.step(zero, gradients=zero.reduced_gradients())
        taken.append(scaler.update())
    with zero.whole_parameters():
        return scales, taken, {n: p.detach().clone() for n, p in model.named_parameters()}


def _expected() -> Parameters:
    """One process that leaves the overflowing steps out."""
    model = Net(mixed=False)
    plain = torch.optim.AdamW(groups(model), **OPTIONS)
    for step in range(TRAINED):
        x, y = rows(step)
        plain.zero_grad()
        if step not in OVERFLOWS:
            mean_loss(model, x, y, sometimes=step % 2 == 0).backward()
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            plain.step()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "stages"),  # of gradients, stage 1 has whole ones and stages 2 and 3 have parts
    [("AdamW", (1, 3)), full("AdamW", (1, 2, 3)), full("torch.AdamW", (1, 2, 3))],
)
def test_an_overflow_on_one_rank_lowers_the_scale_and_skips_the_step_on_all(
    world, name: str, stages: tuple[int, ...]
):
    expected = _expected()
    halves: list[Parameters] = []
    for stage in stages:
        for scales, taken, parameters in world(4).run(_scaled, stage, name, torch.float32):
            assert scales == SCALES
            assert taken == [step not in OVERFLOWS for step in range(TRAINED)]
            for n, p in expected.items():
                torch.testing.assert_close(
                    parameters[n], p, rtol=1e-4, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}"
                )
        found = world(4).run(_scaled, stage, name, torch.float16)
        assert all(scales == SCALES for scales, _, _ in found)
        halves += [parameters for _, _, parameters in found]
    for other in halves[1:]:
        assert all(torch.equal(p, other[n]) for n, p in halves[0].items()), (
            "the stages' 16-bit parameters differ"
        )
    assert all(bool(p.isfinite().all()) for p in halves[0].values())
