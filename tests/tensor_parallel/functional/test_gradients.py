"""Parts of gradients are summed, all of them and in one collective; a norm counts each element
once."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm import Communicator
from pyops.flat import Placement
from pyops.mesh import ALONE
from pyops.tensor_parallel import (
    LayerNorm,
    ParallelAttention,
    ParallelMLP,
    VocabParallelEmbedding,
    clip_grad_norm_,
    grad_norm,
    sync_partial_grads,
)
from pyops.tensor_parallel.functional.regions import gather_tokens
from tests.tensor_parallel.shared_layers import configured

pytestmark = pytest.mark.cpu_only

TOKENS = torch.tensor([[0, 6, 3, 6, 1], [2, 5, 1, 6, 0]])


class Model(nn.Module):
    """An embedding, a block with shared key groups, a norm, and a parameter without a placement."""

    def __init__(self, group: dist.ProcessGroup | None, *, sp: bool) -> None:
        super().__init__()
        how = {"group": group, "sequence_parallel": sp}
        self.embedding = configured(VocabParallelEmbedding, 7, 8, name="e", std=0.5, **how)
        self.norm = LayerNorm(8, **how)
        self.attention = configured(
            ParallelAttention, 8, 4, num_kv_heads=1, causal=True, std=0.5, name="a", **how
        )
        self.mlp = configured(ParallelMLP, 8, 13, skip_bias=True, name="m", std=0.5, **how)
        self.scale = nn.Parameter(torch.tensor([0.5, 1.5]))
        self.group, self.sp = group, sp

    def forward(self, tokens: Tensor) -> Tensor:
        B, T = tokens.shape
        x = self.embedding(tokens)
        x = x + self.attention(self.norm(x), shape=(B, T))
        y, bias = self.mlp(x)
        x = x + y + bias
        if self.sp:
            x = gather_tokens(x, tokens=B * T, duplicated=True, group=self.group)
        return x.reshape(B, T, 8) * self.scale.repeat(4)


def backward(model: Model) -> None:
    torch.sin(model(TOKENS)).square().sum().backward()


def whole_gradients() -> tuple[dict[str, Tensor], float]:
    model = Model(ALONE, sp=False).double()
    backward(model)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return {name: p.grad for name, p in model.named_parameters()}, float(norm)


def finished(rank: int, group: dist.ProcessGroup, sp: bool) -> dict[str, float]:
    expected, norm = whole_gradients()
    model = Model(group, sp=sp).double()
    placements = Placement.of(model)
    backward(model)
    local = {name: p.grad.clone() for name, p in model.named_parameters()}
    comm = Communicator.of(group)
    before = comm.sequence
    sync_partial_grads(model, group=group)
    found = {"collectives": comm.sequence - before}
    for name, p in model.named_parameters():
        mine = placements[name].take(expected[name]) if name in placements else expected[name]
        assert mine.any() or placements[name].start == placements[name].stop
        torch.testing.assert_close(p.grad, mine, rtol=1e-11, atol=1e-12)
        if name in placements and placements[name].partial:
            assert not torch.allclose(local[name], p.grad), f"{name} was whole before the sum"
    assert float(grad_norm(model, group=group)) == pytest.approx(norm, rel=1e-12)
    clipped = copy.deepcopy([p.grad for p in model.parameters()])
    assert float(clip_grad_norm_(model, norm / 4, group=group)) == pytest.approx(norm, rel=1e-12)
    for p, before_clip in zip(model.parameters(), clipped, strict=True):
        torch.testing.assert_close(p.grad, before_clip / 4, rtol=1e-5, atol=0)
    clip_grad_norm_(model, 10 * norm, group=group)
    torch.testing.assert_close(
        p.grad, before_clip / 4, rtol=1e-5, atol=0
    )  # a small norm is left alone
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sp", [False, True])
def test_gradients_and_norm_are_those_of_one_rank(world, size: int, sp: bool):
    assert world(size).run(finished, sp) == [{"collectives": 1}] * size


def perturbed(rank: int, group: dist.ProcessGroup, sp: bool) -> list[str]:
    """Parameters whose gradient on rank 0 changes when rank 1's does, by being summed; all that
    every rank holds must."""
    model = Model(group, sp=sp)
    backward(model)
    placements = Placement.of(model)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.grad.fill_(1.0 if rank == 1 else 0.0)
    sync_partial_grads(model, group=group)
    found = [
        name for name, p in model.named_parameters() if rank == 0 and bool((p.grad == 1.0).any())
    ]
    # A parameter that all ranks hold, and whose gradients differ between them, must be among those.
    for name, gradient in gradients.items():
        theirs = (
            [torch.empty_like(gradient) for _ in range(2)] if placements.get(name, None) else []
        )
        if theirs and placements[name].copies == 2:
            dist.all_gather(theirs, gradient, group=group)
            same = torch.allclose(*theirs, rtol=1e-4, atol=1e-6)
            assert same != placements[name].partial, (
                f"{name}: ranks' gradients are {'equal' if same else 'different'}"
            )
    return found


def test_no_parameter_is_forgotten(world):
    copies = ["attention.kv.weight", "attention.kv.bias"]
    assert world(2).run(perturbed, False)[0] == copies
    found = world(2).run(perturbed, True)[0]
    assert found == ["norm.weight", "norm.bias", *copies, "mlp.down.bias"]


def missing(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """A gradient that only one rank has, main gradients, a frozen parameter, and no group."""
    norm = LayerNorm(2, group=group, sequence_parallel=True)
    if rank == 0:
        norm.weight.grad = torch.tensor([1.0, 2.0])
    norm.bias.main_grad = torch.full((2,), float(rank + 1))
    sync_partial_grads(norm, group=group)
    assert torch.equal(norm.bias.main_grad, torch.full((2,), 3.0))
    assert float(grad_norm(norm, group=group)) == pytest.approx((1 + 4 + 9 + 9) ** 0.5)
    norm.requires_grad_(False)
    before = Communicator.of(group).sequence
    sync_partial_grads(norm, group=group)
    sync_partial_grads(norm, group=ALONE)
    return norm.weight.grad, Communicator.of(group).sequence - before


def test_a_gradient_that_one_rank_lacks_counts_as_zero(world):
    for gradient, collectives in world(2).run(missing):
        assert torch.equal(gradient, torch.tensor([1.0, 2.0]))
        assert collectives == 0


def bf16_sum(rank: int, group: dist.ProcessGroup) -> Tensor:
    norm = LayerNorm(1, group=group, sequence_parallel=True, bias=False, dtype=torch.bfloat16)
    norm.weight.grad = torch.tensor([[512.0, 1.5, 1.5, 1.5][rank]], dtype=torch.bfloat16)
    sync_partial_grads(norm, group=group)
    return norm.weight.grad


def test_sixteen_bit_parts_are_rounded_once(world):
    assert all(float(g) == 516.0 for g in world(4).run(bf16_sum))  # step by step it is 512
