"""FSDP2 with the fused optimizers: losses and parameters of torch's own under FSDP2 and of one
process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from pyops.flat import FlatBuffer
from pyops.onebit import OneBitAdam, OneBitConfig
from pyops.optim import LAMB, LARS, SGD, Adafactor, Adagrad, AdamW, Lion, fuse_into_backward
from tests.grids import full
from tests.optim import layer_oracle
from tests.optim.pairs import HYPER
from tests.optim.rules import RULES, PlainLion
from tests.tolerance import assert_close_to_reference

STEPS, ROWS = 4, 6
NORM = 0.05  # below every gradient's: each step is clipped


class Net(nn.Module):
    """Widths that divide by no number of ranks, a vector that only the first rank has a part of,
    and a matrix of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 1)])
        self.scale = nn.Parameter(torch.ones(1))
        generator = torch.Generator().manual_seed(3)
        for p in self.blocks.parameters():
            p.data.normal_(std=0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.scale


class Rewritten(torch.optim.Optimizer):
    """LAMB or LARS as the oracle writes them, from the first step on each time."""

    def __init__(self, params: Any, rule: Any, **options: Any) -> None:
        super().__init__(params, {})
        self.rule, self.options = rule, options

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("begin", p.detach().clone())
            state.setdefault("grads", []).append(p.grad.clone())
            p.copy_(self.rule(state["begin"], state["grads"], p.dtype, **self.options)[0])


def _lamb(params: Any, **options: Any) -> Rewritten:
    return Rewritten(params, layer_oracle.lamb, **options)


def _lars(params: Any, **options: Any) -> Rewritten:
    return Rewritten(params, layer_oracle.lars, **options)


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (AdamW, torch.optim.AdamW, HYPER),
    "amsgrad": (AdamW, torch.optim.AdamW, HYPER | {"amsgrad": True, "maximize": True}),
    "nesterov": (SGD, torch.optim.SGD, RULES["nesterov"][2]),
    "lion": (Lion, PlainLion, RULES["lion"][2]),
    "adagrad": (Adagrad, torch.optim.Adagrad, RULES["adagrad"][2]),
    "lamb": (LAMB, _lamb, layer_oracle.LAMB),
    "lars": (LARS, _lars, layer_oracle.LARS),
    "adafactor": (
        Adafactor,
        torch.optim.Adafactor,
        {"lr": 0.13, "weight_decay": 0.21, "beta2_decay": -0.7},
    ),
}


def sharded(mesh: DeviceMesh, **options: Any) -> Net:
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x) - x.sum(1, keepdim=True).sin()).square().mean()


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def trained_by_ranks(
    net: nn.Module, optimizer: Any, *, rank: int, clip: bool, first: int = 0
) -> dict[str, list[Any]]:
    """Losses (means over the ranks), norms before clipping, and the whole parameters after all
    steps."""
    losses, norms = [], []
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, batch(rank, step))
        loss.backward()
        if clip:
            norms.append(float(whole(nn.utils.clip_grad_norm_(net.parameters(), NORM))))
        optimizer.step()
        if not clip:
            norms.append(float(optimizer.grad_norm))
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return {"losses": losses, "norms": norms, "params": [whole(p) for p in net.parameters()]}


def trained_alone(make: Any, options: dict[str, Any], ranks: int) -> dict[str, list[Any]]:
    """In float64 and one process, on the batches of all ranks."""
    net = Net().double()
    optimizer = make(net.parameters(), **options)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, torch.cat([batch(rank, step) for rank in range(ranks)]).double())
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), NORM)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "params": [whole(p) for p in net.parameters()]}


def _train(rank: int, group: Any, name: str) -> tuple[Any, Any]:
    ours, theirs, options = CASES[name]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net, plain = sharded(mesh), sharded(mesh)
    found = trained_by_ranks(
        net, ours(net.parameters(), **options, max_grad_norm=NORM), rank=rank, clip=False
    )
    if theirs in (
        _lamb,
        _lars,
        PlainLion,
        torch.optim.Adafactor,
    ):  # which know no DTensor, that of torch 2.13 neither
        return found, None
    return found, trained_by_ranks(
        plain, theirs(plain.parameters(), **options), rank=rank, clip=True
    )


def alone_in_float32(name: str) -> dict[str, list[Any]]:
    _, theirs, options = CASES[name]
    net = Net()
    optimizer = theirs(net.parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, torch.cat([batch(rank, step) for rank in range(2)])).backward()
        nn.utils.clip_grad_norm_(net.parameters(), NORM)
        optimizer.step()
    return {"params": [whole(p) for p in net.parameters()]}


IN_FULL = ("amsgrad", "nesterov")  # the others of their optimizer stand in the suite


@pytest.mark.parametrize("name", [full(name) if name in IN_FULL else name for name in CASES])
def test_trains_as_torchs_own_and_as_one_process(world, name: str):
    _, theirs, options = CASES[name]
    reference = trained_alone(theirs, options, 2)
    for found, plain in world(2).run(_train, name):
        plain = plain or alone_in_float32(name)
        assert found["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(reference["norms"], rel=1e-5)
        for mine, other, right, begin in zip(
            found["params"], plain["params"], reference["params"], Net().parameters(), strict=True
        ):
            tiny = STEPS * torch.finfo(torch.float32).eps * max(1.0, float(right.abs().max()))
            assert_close_to_reference(mine, other, right, tiny=tiny)
            assert not torch.equal(mine, begin.detach()), "a parameter was not stepped"


def give(net: nn.Module, step: int) -> None:
    """The same whole gradients on any number of ranks, each rank its part."""
    generator = torch.Generator().manual_seed(step)
    for p in net.parameters():
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = (
            distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        )


MESH = {  # shape: placements on a mesh of (replicas or data, shards or tensor parallel)
    (7, 4): (Replicate(), Shard(0)),
    (6, 5): (Shard(0), Shard(1)),
    (9,): (Shard(0), Shard(0)),
    (3,): (Shard(0), Replicate()),
    (2, 2): (Replicate(), Replicate()),
    (1, 3): (Shard(0), Replicate()),
    (4, 4): (Shard(1), Shard(0)),
    (5,): None,
}


def mixed(mesh: DeviceMesh | None) -> nn.ParameterList:
    """Parameters spread over a mesh in every way, beside a plain one."""
    generator = torch.Generator().manual_seed(9)
    tensors = [
        (torch.randn(shape, generator=generator), placements) for shape, placements in MESH.items()
    ]
    return nn.ParameterList(
        t if mesh is None or placements is None else distribute_tensor(t, mesh, placements)
        for t, placements in tensors
    )


def _norms(rank: int, group: Any) -> tuple[list[list[float]], dict[str, list[Tensor]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    norms, params = [], {}
    for name, (make, _, options) in CASES.items():
        net = mixed(mesh)
        if name == "adafactor":  # those that it refuses are left out
            net = nn.ParameterList(p for p in net if Shard(1) not in getattr(p, "placements", ()))
        optimizer = make(net.parameters(), **options, max_grad_norm=NORM)
        norms.append([])
        for step in range(2):
            give(net, step)
            optimizer.step()
            norms[-1].append(float(optimizer.grad_norm))
        params[name] = [whole(p) for p in net.parameters()]
    return norms, params


def test_norms_over_a_mesh_of_two_dimensions_count_each_element_once(world):
    found = world(4).run(_norms, timeout=120)
    for i, (name, (make, _, options)) in enumerate(CASES.items()):
        net = mixed(None)
        if name == "adafactor":
            net = nn.ParameterList(
                p
                for p, placed in zip(net, MESH.values(), strict=True)
                if Shard(1) not in (placed or ())
            )
        optimizer = make(net.parameters(), **options, max_grad_norm=NORM)
        for step in range(2):
            give(net, step)
            optimizer.step()
            for norms, _ in found:
                assert norms[i][step] == pytest.approx(float(optimizer.grad_norm), rel=1e-6), name
        for _, params in found:
            for mine, right in zip(params[name], net.parameters(), strict=True):
                torch.testing.assert_close(mine, right.detach(), rtol=2e-6, atol=2e-6, msg=name)


def _sixteen_bits(rank: int, group: Any) -> dict[str, list[Tensor]]:
    found = {}
    for name, options in SIXTEEN.items():
        net = Net().bfloat16()
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        optimizer = AdamW(net.parameters(), **HYPER, **options)
        for step in range(3):
            give(net, step)
            optimizer.step()
        optimizer.refresh_masters()
        found[name] = [whole(p) for p in net.parameters()]
    return found


SIXTEEN: dict[str, dict[str, Any]] = {
    "masters": {"master_weights": True},
    "rounded": {"stochastic_rounding": True, "state_dtype": torch.bfloat16},
    "zeroed": {"zero_grad": True, "state_dtype": torch.float16},
}


def test_sixteen_bits_have_the_bits_of_one_process(world):
    for found in world(2).run(_sixteen_bits):
        for name, options in SIXTEEN.items():
            net = Net().bfloat16()
            optimizer = AdamW(net.parameters(), **HYPER, **options)
            for step in range(3):
                give(net, step)
                optimizer.step()
            for mine, right in zip(found[name], net.parameters(), strict=True):
                assert torch.equal(mine, right.detach()), name


def _policies(rank: int, group: Any) -> list[tuple[Any, Any]]:
    mesh, found = init_device_mesh("cpu", (2,)), []
    for options in (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"reshard_after_forward": False},
    ):
        net, plain = sharded(mesh, **options), sharded(mesh, **options)
        ours = AdamW(net.parameters(), **HYPER, max_grad_norm=NORM, zero_grad=True)
        theirs = torch.optim.AdamW(plain.parameters(), **HYPER)
        found.append(
            (
                trained_by_ranks(net, ours, rank=rank, clip=False),
                trained_by_ranks(plain, theirs, rank=rank, clip=True),
            )
        )
    net, plain = sharded(mesh), sharded(mesh)
    with fuse_into_backward(net, AdamW(net.parameters(), **HYPER)):
        loss_of(net, batch(rank, 0)).backward()
    loss_of(plain, batch(rank, 0)).backward()
    torch.optim.AdamW(plain.parameters(), **HYPER).step()
    found.append(
        tuple(
            {"losses": [], "norms": [], "params": [whole(p) for p in each.parameters()]}
            for each in (net, plain)
        )
    )
    return found


def test_policies_and_steps_within_backward(world):
    for rank in world(2).run(_policies):
        for found, plain in rank:
            for key in ("losses", "norms", "params"):
                torch.testing.assert_close(found[key], plain[key], rtol=1e-5, atol=1e-6)


def _refused(rank: int, group: Any) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole_one = torch.ones(4, 4)
    columns = nn.Parameter(distribute_tensor(whole_one, mesh, [Shard(1)]))
    rows = nn.Parameter(distribute_tensor(whole_one, mesh, [Shard(0)]))
    summands = nn.Parameter(DTensor.from_local(whole_one, mesh, [Partial()]))
    columns.grad = distribute_tensor(whole_one, mesh, [Shard(1)])
    with pytest.raises(
        ValueError, match=r"Adafactor: parameter 0 .* placed .*Shard\(dim=1\).*; use AdamW"
    ):
        Adafactor([columns]).step()
    with pytest.raises(
        ValueError,
        match=r"stochastic_rounding draws by an element's number .* use master_weights=True",
    ):
        AdamW([columns], stochastic_rounding=True, state_dtype=torch.bfloat16).step()
    with pytest.raises(
        ValueError, match="of which each rank has a summand; make it Shard or Replicate"
    ):
        AdamW([summands])
    rows.grad = columns.grad
    with pytest.raises(ValueError, match="zero_grad=True can't zero the gradient of parameter 0"):
        AdamW([rows], zero_grad=True).step()
    AdamW(
        [rows], weight_decay=0.0, lr=0.5
    ).step()  # without it the gradient is brought to where the parameter lies
    torch.testing.assert_close(whole(rows), torch.full((4, 4), 0.5))
    assert torch.equal(whole(columns), whole_one)
    plain = nn.Parameter(whole_one.clone())
    plain.grad = rows.grad
    with pytest.raises(
        TypeError,
        match=r"the gradient of parameter 0 .* is a DTensor, the parameter a plain tensor",
    ):
        AdamW([plain]).step()
    with pytest.raises(TypeError, match=r"OneBitAdam: parameter 0 .* is a DTensor"):
        OneBitAdam([rows], config=OneBitConfig(warmup_steps=2))
    with pytest.raises(TypeError, match="parameter 'w' is a DTensor"):
        FlatBuffer([("w", rows)])
    optimizer = AdamW([rows])
    optimizer.state[rows]["exp_avg"] = optimizer.state[rows]["exp_avg_sq"] = torch.zeros(4, 4)
    with pytest.raises(
        ValueError,
        match=r"state 'exp_avg' of parameter 0 .* is a plain tensor, the parameter a DTensor",
    ):
        optimizer.step()


def test_refuses(world):
    world(2).run(_refused)
