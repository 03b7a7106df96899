"""Pruned weights and what optimizers know of them stay 0, to the bit, with decay and momentum, one
process or several, exact or compressed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops import checkpoint, onebit, optim
from pyops.comm import OneBit
from pyops.data_parallel import DataParallel
from pyops.flat import FlatBuffer
from pyops.mesh import ALONE
from pyops.pruning import CubicSchedule, Masks, gradual, hold, magnitude
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import full

pytestmark = pytest.mark.cpu_only

OPTIMIZERS: dict[str, Any] = {
    "Adam": functools.partial(optim.Adam, lr=1e-2, weight_decay=0.1),
    "AdamW": functools.partial(optim.AdamW, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "SGD": functools.partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Lion": functools.partial(optim.Lion, lr=1e-3, weight_decay=0.1),
    "Adagrad": functools.partial(optim.Adagrad, lr=1e-2, weight_decay=0.1),
    "LAMB": functools.partial(optim.LAMB, lr=1e-2, weight_decay=0.1),
    "LARS": functools.partial(optim.LARS, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "Adafactor": functools.partial(optim.Adafactor, lr=1e-2, weight_decay=0.1),
    "torch.AdamW": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "torch.RMSprop": functools.partial(
        torch.optim.RMSprop, lr=1e-3, momentum=0.9, weight_decay=0.1
    ),
}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 14), nn.Tanh(), nn.Linear(14, 14), nn.Linear(14, 3)).to(dtype)


def step(model: nn.Module, optimizer: Any, number: int, *, rank: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 * rank + number)
    x = torch.randn(8, 9, generator=generator).to(next(model.parameters()).dtype)
    (model if isinstance(model, DataParallel) else optimizer).zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()


def is_zero(tensor: Tensor, mask: Tensor) -> bool:
    """+0 to the bit at all that is not alive."""
    bits = tensor.detach().reshape(mask.shape)[~mask].contiguous().view(torch.uint8)
    return not bits.any()


def check_zero(masks: Masks, optimizer: Any, *, states: int | None = None) -> None:
    seen = 0
    for name, mask in masks.items():
        parameter, alive = masks.parameter(name), mask.alive()
        assert is_zero(parameter, alive), name
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                assert is_zero(value, alive), (name, key)
                assert value[alive].any(), (name, key)
                seen += 1
    assert states is None or seen == states * len(masks)


@pytest.mark.parametrize("steps", [25, full(1000)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pruned_weights_stay_zero(name: str, steps: int):
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    for number in range(3):  # there are moments to forget
        step(model, optimizer, number)
    masks = magnitude(model, 0.6, only=["*.weight"])
    before = [p.detach().clone() for p in model.parameters()]
    with hold(masks, optimizer):
        check_zero(masks, optimizer)
        for number in range(steps):
            step(model, optimizer, number)
        states = {"Adafactor": 0, "SGD": 1, "LARS": 1, "Lion": 1, "Adagrad": 1, "AdamW": 3}
        check_zero(masks, optimizer, states=states.get(name, 2))
    for p, old in zip(model.parameters(), before, strict=True):
        assert (p[old != 0] != old[old != 0]).any(), "the others move"
        with torch.no_grad():
            p.copy_(old)  # a thousand steps leave gradients that are too small to move anything
    step(model, optimizer, 0)
    assert not is_zero(model[0].weight, masks["0.weight"].alive()), "nothing is held any more"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_step_that_turns_weights_over_leaves_plus_zero(dtype: torch.dtype):
    """LAMB's rate times its ratio and weight_decay is 2 here: weights are multiplied by -1."""
    weight = nn.Parameter(torch.tensor([1.0, 0.0], dtype=dtype).repeat(41))
    weight.grad = torch.zeros_like(weight)
    optim.LAMB([weight], lr=2.0, weight_decay=1.0).step()
    assert (weight[::2] == -1).all()
    assert is_zero(weight, weight.detach() != 0)


def test_masters_of_16_bits_stay_zero():
    model = network(torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, master_weights=True)
    for number in range(3):
        step(model, optimizer, number)
    masks = magnitude(model, 0.6, only=["*.weight"])
    with hold(masks, optimizer):
        for number in range(5):
            step(model, optimizer, number)
        check_zero(masks, optimizer, states=3)


def test_a_gradient_that_adds_up_and_is_clipped_is_masked():
    model = network()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    masks = magnitude(model, 0.6, only=["*.weight"])
    with hold(masks, optimizer):
        for number in range(2):
            x = torch.randn(8, 9, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()
            for name, mask in masks.items():
                assert is_zero(masks.parameter(name).grad, mask.alive())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        squares = sum(float(p.grad[p.grad != 0].square().sum()) for p in model.parameters())
        assert float(norm) == pytest.approx(squares**0.5, rel=1e-5)


def test_new_masks_are_taken_up():
    model = network()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    masks = magnitude(model, 0.3, only=["*.weight"])
    with hold(masks, optimizer):
        for number in range(3):
            step(model, optimizer, number)
        fewer = {n: m.alive() & (torch.rand(m.shape) < 0.5) for n, m in masks.items()}
        masks.update(fewer)
        check_zero(masks, optimizer)
        for number in range(3):
            step(model, optimizer, number)
        check_zero(masks, optimizer)


def test_a_flat_parameter_by_itself_is_refused():
    model = network()
    buffer = FlatBuffer(model.named_parameters())
    masks = magnitude(model, 0.6, only=["*.weight"])
    with pytest.raises(ValueError, match=r"0.weight has a mask, but is no parameter of this AdamW"):
        hold(masks, optim.AdamW([buffer.parameter], lr=1e-2))


def errors_of(model: DataParallel) -> dict[str, Tensor]:
    """What this rank adds to the next gradient of each parameter, the shared errors among it."""
    found: dict[str, Tensor] = {}
    errors = model.reducer.errors
    for number in range(len(errors.buckets)) if errors is not None else ():
        memory = errors[number]
        worker, begin = memory.worker.clone(), memory.starts[memory.rank]
        worker[begin : begin + len(memory.server)] += memory.size * memory.server
        for name in memory.layout.names:
            found[name] = worker[memory.layout.slice(name)]
    return found


def compressed_run(model: DataParallel, masks: Masks, rank: int, **options: Any) -> int:
    """Steps of AdamW over the flat parameters; the number of elements whose errors are kept."""
    adam = optim.AdamW([b.parameter for b in model.flat], lr=1e-2, weight_decay=0.1, **options)
    step(model, adam, 0, rank=rank)
    sent, before = 0, errors_of(model)
    with hold(masks, adam):
        for name, error in errors_of(model).items():
            alive = masks[name].alive().view(-1) if name in masks else slice(None)
            assert error.equal(before[name][alive]), "errors of what is still sent are taken over"
            assert error.any()
        for number in range(6):
            step(model, adam, number, rank=rank)
            for name, mask in masks.items():
                assert is_zero(masks.parameter(name), mask.alive())
                assert is_zero(masks.parameter(name).grad, mask.alive())
        for buffer in model.flat:
            state = adam.state[buffer.parameter]
            for name, mask in masks.items():
                where = buffer.layout.slice(name)
                assert is_zero(state["exp_avg"][where], mask.alive())
                assert is_zero(state["exp_avg_sq"][where], mask.alive())
        errors = model.reducer.errors
        sent = (
            0 if errors is None else sum(len(errors[i].worker) for i in range(len(errors.buckets)))
        )
        state = model.communication_state()
        model.load_communication_state(state)
    return sent


def data_parallel(rank: int, group: dist.ProcessGroup) -> tuple[list[Tensor], int, int]:
    found: list[Tensor] = []
    sent = kept = 0
    for codec in (None, OneBit(block=64)):
        module = network()
        masks = magnitude(module, 0.6, only=["*.weight"], group=group)
        model = DataParallel(module, group=group, codec=codec, bucket_bytes=600)
        sent = compressed_run(model, masks, rank)
        found += [p.detach().clone() for p in module.parameters()]
        total = sum(p.numel() for p in module.parameters())
        masked = sum(m.numel for m in masks.values())
        kept = total - masked + sum(m.kept for m in masks.values())
        model.close()
        masks.release()
    return found, sent, kept


def test_data_parallel_exact_and_compressed(world):
    (first, sent, kept), (second, *_) = world(2).run(data_parallel)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    assert sent == kept, "what is pruned is not sent"


def zero_stages(rank: int, group: dist.ProcessGroup) -> list[list[Tensor]]:
    """Parameters after some steps at each stage, with clipping, and the norm."""
    found = []
    for stage in (0, 1, 2, 3):
        for offload in ("none", "cpu") if stage == 2 else ("none",):
            model = network()
            config = ZeroConfig(stage=stage, max_grad_norm=0.05, bucket_bytes=600, offload=offload)
            zero = ZeroOptimizer(model, optim.AdamW, config, group=group, lr=1e-2, weight_decay=0.1)
            step(model, zero, 0, rank=rank)
            masks = magnitude(model, 0.6, only=["*.weight"], optimizer=zero, group=group)
            with hold(masks, zero):
                for number in range(4):
                    step(model, zero, number, rank=rank)
                for each in zero.owned.all_pieces():
                    if each.name in masks:
                        start, stop = each.piece.of_tensor.start, each.piece.of_tensor.stop
                        alive = masks[each.name].alive().view(-1)[start:stop]
                        for value in zero.owned.states_of(each).values():
                            tensor = value.read() if hasattr(value, "read") else value
                            if isinstance(tensor, Tensor) and tensor.numel() == alive.numel() > 1:
                                assert is_zero(tensor, alive)
            with zero.whole_parameters():
                values = [p.detach().clone() for p in model.parameters()]
                for name, mask in masks.items():
                    assert is_zero(model.get_parameter(name), mask.alive())
            found.append([*values, zero.grad_norm.clone()])
            zero.close()
            masks.release()
    return found


def one_process(steps: int) -> tuple[list[Tensor], float]:
    """Both ranks' rows in one process, gradients masked by hand before they are clipped."""
    model = network()
    adam = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    masks: Masks | None = None
    norm = 0.0
    for number in (0, *range(steps)):
        xs = [
            torch.randn(8, 9, generator=torch.Generator().manual_seed(100 * rank + number))
            for rank in range(2)
        ]
        adam.zero_grad()
        model(torch.cat(xs)).square().mean().backward()
        for name, mask in (masks or {}).items():
            model.get_parameter(name).grad.mul_(mask.alive())
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        adam.step()
        if masks is None:
            masks = magnitude(model, 0.6, only=["*.weight"], group=ALONE)
            for name, mask in masks.items():
                state = adam.state[model.get_parameter(name)]
                state["exp_avg"].mul_(mask.alive())
                state["exp_avg_sq"].mul_(mask.alive())
    return [p.detach() for p in model.parameters()], norm


def test_zero_is_one_process(world):
    found = world(2).run(zero_stages)
    expected, norm = one_process(4)
    for of_rank in found:
        for *values, measured in of_rank:
            for value, other in zip(values, expected, strict=True):
                torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)
                assert (value == 0).equal(other == 0)
            assert float(measured) == pytest.approx(norm, rel=1e-4)


def gradual_over_ranks(rank: int, group: dist.ProcessGroup, folder: str) -> list[list[Tensor]]:
    """Pruned along a schedule, interrupted in the middle and gone on with at another stage."""
    found = []
    for stages in ((1,), (3,), (2, 3)):
        model = network()
        for part, stage in enumerate(stages):
            zero = ZeroOptimizer(model, optim.AdamW, ZeroConfig(stage=stage), group=group, lr=1e-2)
            schedule = CubicSchedule(final=0.8, begin=2, every=2, times=3)
            with gradual(model, zero, schedule, scope="global", group=group) as pruner:
                if part:
                    state, _ = checkpoint.load(folder, group=group)
                    zero.load_state_dict(state["optimizer"])
                    pruner.load_state_dict(state["pruner"])
                end = 5 if part < len(stages) - 1 else 12
                for number in range(pruner.steps, end):
                    step(model, zero, number, rank=rank)
                    pruner.step()
                assert pruner.masks is not None
                if end == 5:
                    state = {"pruner": pruner.state_dict(), "optimizer": zero.state_dict()}
                    checkpoint.save(folder, state, group=group)
            with zero.whole_parameters():
                values = [p.detach().clone() for p in model.parameters()]
            zero.close()
        assert pruner.steps == 12
        found.append(values)
    return found


def test_gradual_over_ranks_and_resumed(world, tmp_path):
    (one, three, resumed), others = world(2).run(gradual_over_ranks, str(tmp_path / "saved"))
    for *values, other in zip(one, three, resumed, others[0], strict=True):
        assert all(value.equal(other) for value in values)
    kept = sum(int((p != 0).sum()) for p in one[:4:2])
    numel = 9 * 14 + 14 * 14
    assert kept == numel - round(0.8 * numel)


def test_what_is_refused():
    model = network()
    masks = magnitude(model, 0.5)
    for kind, error, words in (
        (functools.partial(optim.AdamW, eps=0.0), ValueError, r"eps is 0 in group 0 of AdamW"),
        (
            functools.partial(onebit.OneBitAdam, config=onebit.OneBitConfig(warmup_steps=2)),
            TypeError,
            r"OneBitAdam sends signs, and a sign can't say 0",
        ),
    ):
        with pytest.raises(error, match=words):
            hold(masks, kind(model.parameters(), lr=1e-3))
    with pytest.raises(ValueError, match=r"0.weight has a mask, but is no parameter of this SGD"):
        hold(masks, optim.SGD(model[3].parameters(), lr=0.1))
    zero = ZeroOptimizer(model, optim.AdamW, ZeroConfig(stage=2), group=ALONE, lr=0.1)
    with pytest.raises(ValueError, match=r"0.weight belongs to another optimizer's flat tensors"):
        hold(masks, optim.SGD(model.parameters(), lr=0.1))
    with hold(masks, zero), pytest.raises(ValueError, match=r"another hold masks the gradients"):
        hold(masks, zero)
    hold(masks, zero).close()
