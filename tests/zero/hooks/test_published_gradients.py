"""What a program finds in .grad after backward: torch's own clipping, scaling and forgetting do
what they do in one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import full
from tests.zero.making import zero_optimizer
from tests.zero.models import Net, mean_loss, part

STEPS = 3


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _treat(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """What a loop does between backward and step; the norm that it sees."""
    parameters = _trained(model)
    if how == "norm":
        return float(nn.utils.clip_grad_norm_(parameters, 0.2))
    if how == "foreach norm":
        return float(
            nn.utils.clip_grad_norm_(parameters, 0.2, foreach=True, error_if_nonfinite=True)
        )
    if how == "inf norm":
        return float(nn.utils.clip_grad_norm_(parameters, 0.02, norm_type=torch.inf))
    if how == "value":
        nn.utils.clip_grad_value_(parameters, 0.01)
        return float(
            nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], 1.0)
        )
    if how == "own loop":
        for p in parameters:
            if p.grad is None:
                continue
            p.grad.data.mul_(0.5).div_(torch.tensor(3.0))
        return float(sum(p.grad.data.norm(2) ** 2 for p in parameters if p.grad is not None))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    return float(nn.utils.clip_grad_norm_(parameters, 0.2))


HOW = ("norm", "foreach norm", "inf norm", "value", "own loop", "scaler")


def _clipped(rank: int, group: Any, stage: int, hows: tuple[str, ...]) -> dict[str, Any]:
    size, found = dist.get_world_size(group), {}
    for how in hows:
        ours, theirs = Net(mixed=False), Net(mixed=False)
        zero = ZeroOptimizer(
            ours, torch.optim.SGD, ZeroConfig(stage=stage), group=group, lr=0.1, momentum=0.9
        )
        plain = torch.optim.SGD(_trained(theirs), lr=0.1, momentum=0.9)
        norms = []
        for step in range(STEPS):
            mean_loss(ours, *part(step, rank, size)).backward()
            mine = _treat(how, ours, zero)
            zero.step()
            plain.zero_grad()
            for r in range(size):
                (mean_loss(theirs, *part(step, r, size)) / size).backward()
            norms.append((mine, _treat(how, theirs, plain)))
            plain.step()
        with zero.whole_parameters():
            worst = max(
                float((p - q).abs().max())
                for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)
            )
            unclipped = Net(mixed=False)
        moved = max(
            float((p - q).abs().max())
            for p, q in zip(theirs.parameters(), unclipped.parameters(), strict=True)
        )
        found[how] = (norms, worst, moved)
        zero.close()
    return found


@pytest.mark.parametrize(
    ("stage", "hows"),  # .grad is a part at stages 2 and 3, and the whole before
    [
        (0, ("norm", "value")),
        (1, ("norm", "inf norm", "scaler")),
        (2, ("foreach norm", "own loop")),
        (3, HOW),
        *(full(stage, HOW) for stage in (0, 1, 2)),
    ],
)
def test_clipping_by_torch_is_that_of_one_process(world, stage: int, hows: tuple[str, ...]):
    for found in world(2).run(_clipped, stage, hows):
        for how in hows:
            norms, worst, moved = found[how]
            for ours, theirs in norms:
                assert ours == pytest.approx(theirs, rel=2e-6), how
                assert theirs > 0, how
            assert worst < 2e-6, how  # float32 sums over the ranks in another order
            assert moved > 1e-4, how


def _forgotten(rank: int, group: Any, stage: int) -> list[Any]:
    """model.zero_grad() forgets a backward, all of it or one parameter's; gradients set by hand are
    refused."""
    model, other, said = Net(mixed=False), Net(mixed=False), []
    options = {
        "stage": stage,
        "group": group,
        "lr": 0.1,
        "weight_decay": 0.1,
    }  # what counts no more does not decay either
    optimizers = [zero_optimizer(m, torch.optim.SGD, **options) for m in (model, other)]
    (mean_loss(model, *part(0, rank, 2)) * 100).backward()
    model.zero_grad()
    for m in (model, other):
        mean_loss(m, *part(1, rank, 2)).backward()
    assert all(p.grad is not None for p in _trained(model))
    for m, dropped in (
        (model, model.last.weight),
        (other, other.last.weight),
    ):  # twice: sums of two backwards, one forgotten
        mean_loss(m, *part(2, rank, 2)).backward()
        dropped.grad = None
    before = {}
    for m, optimizer in zip((model, other), optimizers, strict=True):
        with optimizer.whole_parameters():
            before[m] = m.last.weight.detach().clone()
        optimizer.step()
    with optimizers[0].whole_parameters(), optimizers[1].whole_parameters():
        said.append(
            all(
                torch.equal(p, q)
                for p, q in zip(model.parameters(), other.parameters(), strict=True)
            )
        )
        said.append(torch.equal(model.last.weight, before[model]))
        said.append(torch.equal(model.first.weight, Net(mixed=False).first.weight))
    if rank == 1:
        model.first.bias.grad = torch.ones_like(model.shift)
    try:
        optimizers[0].step()
    except RuntimeError as error:
        said.append(str(error))
    mean_loss(other, *part(0, rank, 2)).backward()
    for look in (
        lambda g: g.abs().mean(),
        lambda g: g + 1,
        lambda g: g.mul_(torch.ones(10)),
        lambda g: torch.isfinite(g).all(),
    ):
        try:
            look(other.first.bias.grad)
        except RuntimeError as error:
            said.append("max_grad_norm" in str(error))
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_forgotten_counts_no_more_and_what_is_strange_is_refused(world, stage: int):
    for rank, found in enumerate(world(2).run(_forgotten, stage)):
        assert found[:3] == [True, True, False]
        assert ("first.bias" if rank else "on another rank") in found[3]
        assert found[4:] == [True] * 4


def _anew(model: nn.Module) -> None:
    for p in _trained(model):
        if p.grad is not None:
            p.grad = p.grad.detach()


def _continued(rank: int, group: Any, stage: int) -> dict[str, bool]:
    """Two backwards before one step: `.grad` is made anew between them, or autograd adds out of
    place."""
    found, size = {}, dist.get_world_size(group)
    for how, create_graph in (("anew", False), ("graph", True)):
        ours, theirs = Net(mixed=False), Net(mixed=False)
        zero = ZeroOptimizer(ours, torch.optim.SGD, ZeroConfig(stage=stage), group=group, lr=0.1)
        plain = torch.optim.SGD(_trained(theirs), lr=0.1)
        for step in range(2):
            mean_loss(ours, *part(step, rank, size)).backward(create_graph=create_graph)
            for r in range(size):
                (mean_loss(theirs, *part(step, r, size)) / size).backward()
            if how == "anew":
                _anew(ours)
        zero.step()
        plain.step()
        with zero.whole_parameters():
            found[how] = all(
                torch.allclose(a, b, rtol=1e-5, atol=1e-6)
                for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
            )
            found[f"{how}, a step"] = not torch.equal(
                ours.first.weight, Net(mixed=False).first.weight
            )
        zero.close()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_another_backward_adds_to_a_gradient_that_is_the_same_in_another_tensor(world, stage: int):
    for found in world(2).run(_continued, stage):
        assert [what for what, fine in found.items() if not fine] == []


def _left_whole(rank: int, group: Any, stage: int) -> list[bool]:
    """A reduced backward, one within no_sync(), all gradients or one forgotten, and another reduced
    backward."""
    found, size = [], dist.get_world_size(group)
    for forgotten in ("all", "one"):
        ours, theirs = Net(mixed=False), Net(mixed=False)
        zero = ZeroOptimizer(ours, torch.optim.SGD, ZeroConfig(stage=stage), group=group, lr=0.1)
        plain = torch.optim.SGD(_trained(theirs), lr=0.1)
        for step in range(3):
            with zero.no_sync() if step == 1 else nullcontext():
                mean_loss(ours, *part(step, rank, size)).backward()
            for r in range(size):
                (mean_loss(theirs, *part(step, r, size)) / size).backward()
            for model in (ours, theirs) if step == 1 else ():
                for p in model.parameters() if forgotten == "all" else [model.last.weight]:
                    p.grad = None
        zero.step()
        plain.step()
        with zero.whole_parameters():
            found += [
                torch.allclose(a, b, rtol=1e-5, atol=1e-6)
                for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
            ]
            found.append(not torch.equal(ours.last.weight, Net(mixed=False).last.weight))
        zero.close()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_forgotten_after_a_backward_within_no_sync_counts_no_more(world, stage: int):
    for found in world(2).run(_left_whole, stage):
        assert all(found)


def _changed(rank: int, group: Any) -> tuple[float, float, str]:
    model = Net(mixed=False)
    zero = ZeroOptimizer(model, torch.optim.SGD, ZeroConfig(stage=2), group=group, lr=0.1)
    mean_loss(model, *part(0, rank, 2)).backward()
    norms = []
    for _ in range(2):
        norms.append(
            float(nn.utils.get_total_norm([p.grad for p in _trained(model) if p.grad is not None]))
        )
        for chunk in zero.reduced_gradients():
            chunk.mul_(0.25)
    model.first.bias.grad = model.last.bias.grad  # of another parameter
    try:
        zero.step()
    except RuntimeError as error:
        return norms[0], norms[1], str(error)
    return norms[0], norms[1], "nothing"


def test_norms_are_of_changed_gradients_and_a_gradient_is_of_its_own_parameter(world):
    for before, after, said in world(2).run(_changed):
        assert before > 0
        assert after == pytest.approx(0.25 * before, rel=1e-6)
        assert "first.bias" in said


def _total(gradients: list[Tensor], group: Any, stage: int) -> float:
    """The norm of all gradients in float64, from the ranks' parts themselves."""
    square = sum(
        (g.part().double().square().sum() for g in gradients), torch.zeros((), dtype=torch.float64)
    )
    if stage:
        dist.all_reduce(square, group=group)
    return float(square.sqrt())


def _norms(rank: int, group: Any, stage: int, dtype: torch.dtype) -> list[tuple[float, float]]:
    """(torch's norm of the gradients, what it is) before and after each thing that changes them."""
    model = Net(mixed=False).to(dtype)
    zero = ZeroOptimizer(model, torch.optim.SGD, ZeroConfig(stage=stage), group=group, lr=0.1)
    found: list[tuple[float, float]] = []

    def look() -> None:
        gradients: list[Any] = [p.grad for p in _trained(model) if p.grad is not None]
        found.append((float(nn.utils.get_total_norm(gradients)), _total(gradients, group, stage)))

    for step in range(2):
        mean_loss(model, *(t.to(dtype) for t in part(step, rank, 2))).backward()
        look()
        if step == 0:
            mean_loss(model, *(t.to(dtype) for t in part(2, rank, 2))).backward()
            look()
        else:
            for p in _trained(model):
                if p.grad is not None:
                    p.grad.mul_(0.5)
            look()
            found_inf = torch.zeros(())
            gradients: list[Any] = [p.grad for p in _trained(model) if p.grad is not None]
            torch._amp_foreach_non_finite_check_and_unscale_(
                gradients, found_inf, torch.tensor(0.25)
            )
            look()
            found.append((float(found_inf), 0.0))
        kept: Any = model.last.weight.grad
        zero.step()
        with pytest.raises(
            RuntimeError,
            match=r"the gradient of last\.weight is used up: a step or zero_grad\(\) came after",
        ):
            torch.linalg.vector_norm(kept)
    return found


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, torch.float32), (1, torch.bfloat16), (3, torch.float32)]
)
def test_norms_are_those_of_the_gradients_as_they_are_now(world, stage: int, dtype: torch.dtype):
    for found in world(2).run(_norms, stage, dtype):
        for seen, wanted in found:
            assert seen == pytest.approx(wanted, rel=1e-6)
        one, two, three, half, eighth, _ = (wanted for _, wanted in found)
        assert len({one, two, three}) == 3, "each is another"
        assert (half, eighth) == pytest.approx((three / 2, three / 8), rel=2**-7)


def _overflow(rank: int, group: Any, stage: int) -> list[Any]:
    """torch's GradScaler: one inf, in the part of one rank, skips the step and halves the scale on
    all."""
    model = Net(mixed=False)
    zero = ZeroOptimizer(model, torch.optim.SGD, ZeroConfig(stage=stage), group=group, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    found: list[Any] = []
    for step in range(3):
        scaler.scale(mean_loss(model, *part(step, rank, 2))).backward()
        if step == 1 and rank == 1:
            mine = next(
                g.part() for p in _trained(model) if (g := p.grad) is not None and g.part().numel()
            )
            mine[0] = torch.inf
        if step == 2:
            scaler.unscale_(zero)
        with zero.whole_parameters():
            before = [p.detach().clone() for p in model.parameters()]
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
        with zero.whole_parameters():
            found.append(
                (
                    scaler.get_scale(),
                    not all(
                        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
                    ),
                )
            )
    return found


def _partial(rank: int, group: Any) -> tuple[str, str]:
    """With tensor parallelism a gradient is summed over the other axis in step(): its norm, or
    clamping, before is refused."""
    model = nn.Linear(4, 3)
    alone = dist.new_group([rank], use_local_synchronization=True)
    zero = ZeroOptimizer(
        model, torch.optim.SGD, ZeroConfig(stage=1), group=alone, tp_group=group, lr=0.1
    )
    model(torch.ones(2, 4)).sum().backward()
    said = []
    for treat in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        with pytest.raises(RuntimeError) as caught:
            treat(model.parameters(), 0.2)
        said.append(str(caught.value))
    assert model.weight.grad is not None
    model.weight.grad.mul_(0.5)  # of a sum what it is of the summands
    zero.step()
    return said[0], said[1]


def test_gradients_that_step_has_still_to_sum_have_no_norm_yet(world):
    for said in world(2).run(_partial):
        for each in said:
            assert "with tp_group it is summed in step()" in each
            assert "pass max_grad_norm= to ZeroOptimizer" in each


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torchs_grad_scaler(world, stage: int):
    assert world(2).run(_overflow, stage) == [[(8.0, True), (4.0, False), (4.0, True)]] * 2
