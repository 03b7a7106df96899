"""precision=: the bits of a model that was cast by hand, and of a loss scale that was driven by
hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pyops.optim
from pyops.precision import PRECISIONS, LossScale, LossScaler, Precision
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import full
from tests.zero.making import zero_optimizer
from tests.zero.models import Net, groups, mean_loss, part

pytestmark = pytest.mark.on_device

STEPS = 6


def _optimizer(model: Net, stage: int, name: str, group: Any, **options: Any) -> ZeroOptimizer:
    cls = getattr(
        torch.optim if name.startswith("torch.") else pyops.optim, name.removeprefix("torch.")
    )
    return zero_optimizer(
        model,
        cls,
        stage=stage,
        bucket_bytes=2000,
        group=group,
        params=groups(model),
        lr=1e-2,
        **options,
    )


def _whole(model: Net, zero: ZeroOptimizer) -> dict[str, Tensor]:
    with zero.whole_parameters():
        return {
            n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]
        }


def _loss(model: Net, step: int, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    x, y = part(step, rank, size)
    broken = math.inf if (step, rank) in ((2, 1), (3, 0)) else 1.0
    return mean_loss(model, x.to(dtype), y.to(dtype)).float() * broken


def _scale_options() -> dict[str, Any]:
    return {"initial": 2.0**10, "window": 2, "hysteresis": 2}


def _by_argument(
    rank: int, group: Any, stage: int, name: str, precision: str, norm: float | None
) -> Any:
    size, kind = dist.get_world_size(group), PRECISIONS[precision]
    model = Net(mixed=True)  # a float64 layer is cast, too
    scale = LossScale(**_scale_options()) if kind.scaled else None
    zero = _optimizer(
        model, stage, name, group, precision=precision, loss_scale=scale, max_grad_norm=norm
    )
    scales = []
    for step in range(STEPS):
        scales.append(1.0 if zero.loss_scale is None else zero.loss_scale.scale)
        if kind.scaled or step not in (2, 3):
            zero.scale(_loss(model, step, rank, size, kind.dtype)).backward()
            zero.step()
    return _whole(model, zero), scales, zero.state_dict().get("loss_scale")


def _by_hand(
    rank: int, group: Any, stage: int, name: str, precision: str, norm: float | None
) -> Any:
    size, kind = dist.get_world_size(group), PRECISIONS[precision]
    model = Net(mixed=True).to(kind.dtype)
    zero = _optimizer(model, stage, name, group, max_grad_norm=norm)
    scaler = LossScaler(group=group, enabled=kind.scaled, **_scale_options())
    scales = []
    for step in range(STEPS):
        scales.append(scaler.get_scale())
        if kind.scaled or step not in (2, 3):
            scaler.scale(_loss(model, step, rank, size, kind.dtype)).backward()
            scaler.step(zero, gradients=zero.reduced_gradients())
            scaler.update()
    return _whole(model, zero), scales, scaler.state_dict() or None


@pytest.mark.parametrize(
    ("stage", "name", "precision", "norm"),
    [
        (0, "AdamW", "fp16", None),
        full(1, "AdamW", "fp16", 0.2),
        (2, "torch.AdamW", "fp16", None),
        (3, "AdamW", "fp16", 0.2),
        (1, "torch.AdamW", "bf16", 0.2),
        full(2, "AdamW", "bf16", None),
        (3, "Lion", "bf16", None),
        (2, "AdamW", "fp32", None),
    ],
)
def test_same_bits_as_by_hand(world, stage: int, name: str, precision: str, norm: float | None):
    ours, theirs = (
        world(2).run(body, stage, name, precision, norm) for body in (_by_argument, _by_hand)
    )
    start = Net(mixed=True).to(PRECISIONS[precision].dtype)
    for (found, scales, state), (expected, by_hand, saved) in zip(ours, theirs, strict=True):
        assert scales == by_hand
        assert state == saved
        assert all(t.dtype == PRECISIONS[precision].dtype for t in found.values())
        assert all(torch.equal(found[n], t) for n, t in expected.items())
        assert not torch.equal(found["first.weight"], start.first.weight), "nothing was stepped"
    if (
        precision == "fp16"
    ):  # two good steps double it; the first overflow is forgiven, the second halves
        assert ours[0][1] == [1024.0, 1024.0, 2048.0, 2048.0, 1024.0, 1024.0]
        assert ours[0][2]["skipped"] == 2


def _resumed(rank: int, group: Any) -> bool:
    """A run that is saved behind an overflow goes on with the scale that it had."""

    def make() -> tuple[Net, ZeroOptimizer]:
        model = Net(mixed=False)
        return model, _optimizer(
            model, 2, "AdamW", group, precision="fp16", loss_scale=LossScale(**_scale_options())
        )

    def steps(model: Net, zero: ZeroOptimizer, *numbers: int) -> None:
        for step in numbers:
            zero.scale(_loss(model, step, rank, 2, torch.float16)).backward()
            zero.step()

    model, zero = make()
    steps(model, zero, 0, 1, 2, 3)
    again, other = make()
    other.load_model_state_dict(zero.model_state_dict())
    other.load_state_dict(zero.state_dict())
    assert other.loss_scale is not None
    scale = other.loss_scale.scale
    steps(model, zero, 4, 5)
    steps(again, other, 4, 5)
    assert other.loss_scale.state_dict() == zero.loss_scale.state_dict()
    return scale == 1024.0 and all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_the_scale_is_saved_and_loaded(world):
    assert world(2).run(_resumed) == [True, True]


def test_a_scaler_of_the_user_takes_the_place_of_our_own():
    model = Net(mixed=False)
    zero = _optimizer(model, 1, "AdamW", None, precision="fp16")
    scaler = LossScaler(initial=256.0)
    scaler.scale(_loss(model, 0, 0, 1, torch.float16)).backward()
    scaler.step(zero, gradients=zero.reduced_gradients())
    assert scaler.update()
    assert zero.loss_scale is not None
    assert zero.loss_scale.good_steps == 0
    assert not torch.equal(model.first.weight, Net(mixed=False).half().first.weight)


def test_no_masters_where_the_precision_says_so():
    light = Precision("light", torch.bfloat16, master_weights=False, scaled=False)
    for precision, masters in ((light, False), ("bf16", True)):
        model = Net(mixed=False)
        zero = _optimizer(model, 1, "AdamW", None, precision=precision)
        mean_loss(model, *(t.bfloat16() for t in part(0, 0, 1))).backward()
        zero.step()
        assert ("master" in zero.state_dict()["state"]["first.weight"]) == masters
    with pytest.raises(ValueError, match="master"):
        _optimizer(Net(mixed=False), 1, "torch.AdamW", None, precision=light)


def test_a_model_on_meta_is_made_in_the_dtype():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    zero = ZeroOptimizer(
        model, pyops.optim.AdamW, ZeroConfig(stage=3, precision="bf16", device="cpu")
    )
    with zero.whole_parameters():
        assert all(
            p.dtype == torch.bfloat16 and bool(p.abs().max() > 0) for p in model.parameters()
        )


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"precision": "fp8"}, ValueError, "fp8"),
        ({"precision": torch.bfloat16}, TypeError, "bfloat16"),
        ({"loss_scale": LossScale()}, ValueError, "fp16"),
        ({"precision": "bf16", "loss_scale": LossScale()}, ValueError, "bf16"),
        ({"precision": "fp16", "loss_scale": 128.0}, TypeError, "128"),
    ],
)
def test_refused_before_anything_is_changed(
    options: dict[str, Any], error: type[Exception], words: str
):
    model = Net(mixed=False)
    with pytest.raises(error, match=words):
        _optimizer(model, 1, "AdamW", None, **options)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def _differ(rank: int, group: Any) -> str:
    try:
        _optimizer(Net(mixed=False), 1, "AdamW", group, precision="bf16" if rank else "fp16")
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_must_agree(world):
    for words in world(2).run(_differ):
        assert "precision" in words
