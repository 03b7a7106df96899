"""What scripts do with a torch optimizer works with ours: schedulers, closures, hooks, compile,
graphs, flat buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from pyops.optim import Adam, AdamW
from tests.grids import full
from tests.optim.pairs import (
    HYPER,
    assert_as_torch,
    assert_equal,
    assert_moved,
    give_gradients,
    parameters,
    run,
    twins,
)

SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[1, 4]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.8),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.3, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.2, total_iters=4),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5, power=2.0),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.001, max_lr=0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name):
    """The same learning rates, momenta and parameters as with torch's optimizer."""
    a = parameters(((5, 7), (3,)))
    b, c = twins(a), twins(a, torch.float64)
    optimizers = [AdamW(a, **HYPER), torch.optim.AdamW(b, **HYPER), torch.optim.AdamW(c, **HYPER)]
    schedulers = [SCHEDULERS[name](o) for o in optimizers]
    rates = set()
    for step in range(6):
        run(optimizers, [a, b, c], steps=1, first=step)
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        groups = [o.param_groups[0] for o in optimizers]
        assert groups[0]["lr"] == groups[1]["lr"]
        assert groups[0]["betas"] == groups[1]["betas"]
        rates.add(groups[0]["lr"])
    assert len(rates) > 1, "a scheduler that changes nothing proves nothing"
    assert_as_torch(a, b, c, steps=6)


def test_closure_is_called_with_grad_and_its_loss_returned():
    a = parameters(((4,),))
    optimizer = AdamW(a, **HYPER)
    before = [p.detach().clone() for p in a]

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = a[0].square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == pytest.approx(before[0].square().sum().item())
    assert_moved(before, a)


def test_step_hooks_and_profiler_name():
    a = parameters(((4,),))
    optimizer = Adam(a, **HYPER)
    calls = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("before"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("after"))
    give_gradients(a, seed=0)
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert calls == ["before", "after"]
    assert any(event.name == "Optimizer.step#Adam.step" for event in profile.events())


def test_named_parameters_and_param_names():
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.named_parameters(), **HYPER)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    give_gradients(list(model.parameters()), seed=0)
    model.weight.grad = torch.zeros(2, 3).to_sparse()
    with pytest.raises(TypeError, match="'weight' is sparse"):
        optimizer.step()


def test_defaults_are_those_of_torch():
    for ours, theirs in ((AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)):
        a, b = parameters(), parameters()
        mine, plain = ours(a).param_groups[0], theirs(b).param_groups[0]
        assert {k: v for k, v in mine.items() if k in plain and k != "params"} == {
            k: v for k, v in plain.items() if k != "params"
        }


@pytest.mark.real_device
@pytest.mark.parametrize("options", [full({}), {"max_grad_norm": 0.5}], ids=str)
def test_compiled_step(options):
    """torch.compile of step() takes the op on lists: one graph, the same numbers."""
    a = parameters(((5, 7), (3,)))
    b = twins(a)
    mine, plain = AdamW(a, **HYPER, **options), AdamW(b, **HYPER, **options)
    compiled = torch.compile(mine.step, backend="aot_eager", fullgraph=True)
    give_gradients(a, b, seed=0)
    for step in range(3):
        for p, q in zip(a, b, strict=True):
            p.grad.copy_(torch.full_like(p, 0.5 + step))
            q.grad.copy_(p.grad)
        compiled()
        plain.step()
    assert_equal(a, b)
    torch._dynamo.reset()


def test_gradients_of_a_flat_buffer(device):
    """One flat parameter steps as its parts would."""
    flat_module = pytest.importorskip("pyops.flat")
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(device)
    twin = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(device)
    twin.load_state_dict(model.state_dict())
    buffer = flat_module.FlatBuffer(model.named_parameters())
    mine, plain = AdamW([buffer.parameter], **HYPER), AdamW(twin.parameters(), **HYPER)
    x = torch.randn(4, 7, device=device)
    for _ in range(3):
        for each in (model, twin):
            each(x).square().sum().backward()
        mine.step()
        plain.step()
        buffer.zero_grad()
        plain.zero_grad()
    torch.testing.assert_close(
        list(model.parameters()), list(twin.parameters()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5, "master_weights": True}], ids=str)
def test_captured_in_a_cuda_graph(options, device):
    """Warm up, capture, replay: as eager steps, with the learning rate read from its tensor at each
    replay."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs need CUDA")
    dtype = torch.bfloat16 if options else torch.float32
    a = parameters(dtype=dtype, device=device)
    b = twins(a)
    hyper = {k: v for k, v in HYPER.items() if k != "lr"}
    lr = torch.tensor(0.01, device=device)
    mine, plain = (
        AdamW(a, lr=lr, capturable=True, **hyper, **options),
        AdamW(b, lr=lr.clone(), **hyper, **options),
    )
    give_gradients(a, b, seed=0)
    mine.step()
    plain.step()
    mine.zero_grad(set_to_none=True)
    give_gradients(a, b, seed=1)  # other memory than when the table was made
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine.step()
    for turn in range(3):
        for p, q in zip(a, b, strict=True):
            q.grad.normal_()
            p.grad.copy_(q.grad)
        lr.fill_(0.01 * (turn + 1))
        plain.param_groups[0]["lr"] = lr.item()
        graph.replay()
        plain.step()
    assert_equal(a, b)


def test_capture_without_capturable_is_refused(device):
    if device.type != "cuda":
        pytest.skip("CUDA graphs need CUDA")
    a = parameters(device=device)
    optimizer = AdamW(a)
    run([optimizer], [a], steps=1)
    with (
        pytest.raises(RuntimeError, match="capturable=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


def test_step_never_waits_for_the_device(device):
    if device.type != "cuda":
        pytest.skip("only an accelerator can be waited for")
    a = parameters(device=device)
    optimizer = AdamW(a, **HYPER, max_grad_norm=1.0, zero_grad=True)
    run([optimizer], [a], steps=1)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(2):
            for p in a:
                p.grad = torch.ones_like(p)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
