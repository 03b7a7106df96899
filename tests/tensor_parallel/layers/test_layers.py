"""MLP, embedding, norms and dropout on 1 to 4 ranks against one rank in float64, and a block made
of them."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pyops import random
from pyops.comm import Communicator
from pyops.flat import Placement
from pyops.tensor_parallel import (
    Dropout,
    LayerNorm,
    ParallelAttention,
    ParallelMLP,
    Ranks,
    RMSNorm,
    VocabParallelEmbedding,
    set_dropout,
    sync_partial_grads,
)
from tests.grids import cut, full
from tests.tensor_parallel.shared_layers import (
    Case,
    configured,
    errors_on_rank,
    mean,
    randomise,
    tokens_of,
)

pytestmark = pytest.mark.on_device

Shape = tuple[int, int]


class Block(nn.Module):
    """Norm, attention, dropout and residual, norm with the residual, MLP, dropout and residual."""

    def __init__(self, norm: Any, *, gated: bool, kv_heads: int, p: float, **shared: Any) -> None:
        super().__init__()
        where = {k: shared[k] for k in ("group", "sequence_parallel") if k in shared}
        self.norm1, self.norm2 = norm(8, **where), norm(8, **where)
        self.attention = configured(
            ParallelAttention,
            8,
            4,
            num_kv_heads=kv_heads,
            causal=True,
            dropout=p,
            skip_bias=True,
            **shared,
        )
        self.mlp = configured(
            ParallelMLP, 8, 13, gated=gated, activation="silu" if gated else "gelu", **shared
        )
        self.dropout1, self.dropout2 = (Dropout(p, width=8, **where) for _ in range(2))

    def forward(self, x: Tensor, shape: Shape) -> Tensor:
        y, bias = self.attention(self.norm1(x), shape=shape)
        h, x = self.norm2(self.dropout1(y, bias), x)
        return self.dropout2(self.mlp(h), None, x)


def blocked(layer: nn.Module, x: Tensor, shape: Shape) -> Tensor:
    set_dropout(layer, seed=3, step=7, shape=shape, first_row=5)
    return layer(x, shape)


def shaped(layer: nn.Module, x: Tensor, shape: Shape) -> Tensor:
    return layer(x, shape=shape)


def skipped(layer: nn.Module, x: Tensor, shape: Shape) -> Tensor:
    y, bias = layer(x)
    return y + bias


CASES = {
    "mlp": Case(partial(configured, ParallelMLP, 6, 12), 6),
    "mlp, padded": Case(
        partial(configured, ParallelMLP, 6, 7, activation="gelu_tanh", bias=False), 6
    ),
    "mlp, bias skipped": Case(
        partial(configured, ParallelMLP, 6, 12, activation="relu", skip_bias=True), 6, skipped
    ),
    "gated mlp": Case(partial(configured, ParallelMLP, 6, 12, gated=True, activation="silu"), 6),
    "gated mlp, padded": Case(
        partial(configured, ParallelMLP, 6, 7, gated=True, activation="gelu", bias=False), 6
    ),
    "block": Case(partial(Block, LayerNorm, gated=False, kv_heads=4, p=0.3), 8, blocked),
    "block, gated, 1 group": Case(
        partial(Block, RMSNorm, gated=True, kv_heads=1, p=0.3), 8, blocked
    ),
}
BOUND = {torch.float64: 1e-12, torch.float32: 1e-6}


def errors(
    rank: int, group: dist.ProcessGroup | None, size: int, dtype: torch.dtype
) -> dict[str, Any]:
    return {
        f"{name}, {shape}, sequence_parallel={sp}": errors_on_rank(
            group, case, shape=shape, dtype=dtype, sequence_parallel=sp
        )
        for name, case in CASES.items()
        if size != 3 or "block" not in name
        for shape, sp in (((2, 6), False), ((1, 5), True))[: 1 if size == 1 else 2]
    }


GRID = [(size, dtype) for size in (1, 2, 3, 4) for dtype in BOUND]
# float64 shows what is added where; float32, on two ranks, that sums of parts lose nothing.
IN_SUITE = [(size, dtype) for size, dtype in GRID if (dtype == torch.float32) == (size == 2)]


@pytest.mark.parametrize(("size", "dtype"), cut(GRID, keep=IN_SUITE), ids=str)
def test_output_and_gradients_are_those_of_one_rank(world, size: int, dtype: torch.dtype):
    results = world(size).run(errors, size, dtype) if size > 1 else [errors(0, None, 1, dtype)]
    for found in results:
        assert len(found) >= (len(CASES) if size == 1 else 10)
        for name, (shared, alone) in found.items():
            for what, error in shared.items():
                assert error <= max(
                    BOUND[dtype], 4 * alone[what] if dtype == torch.float32 else 0
                ), (name, what, error)


def wide_errors(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    torch.manual_seed(1)
    wide = {
        "mlp": Case(partial(configured, ParallelMLP, 32, 1024), 32),
        "attention": Case(partial(configured, ParallelAttention, 64, 16), 64, shaped),
    }
    return {
        f"{name}, sequence_parallel={sp}": errors_on_rank(
            group, case, shape=(2, 32), dtype=torch.bfloat16, sequence_parallel=sp, distance=mean
        )
        for name, case in wide.items()
        for sp in (False, True)
    }


@pytest.mark.parametrize("size", [full(2), 4])
def test_bf16_error_is_that_of_one_rank(world, size: int):
    """Root mean squares over all ranks' parts, against 1.1 times those of one rank in bf16."""
    found = world(size).run(wide_errors)
    for name in found[0]:
        for what in found[0][name][0]:
            ours = (sum(each[name][0][what] ** 2 for each in found) / size) ** 0.5
            assert ours <= 1.1 * found[0][name][1][what], (
                name,
                what,
                ours,
                found[0][name][1][what],
            )


def traffic(rank: int, group: dist.ProcessGroup, sp: bool) -> list[tuple[int, int]]:
    """(collectives, bytes) of the forward and of the backward of a block over 16 tokens, 8 wide, in
    fp32."""
    comm, found = Communicator.of(group), []
    layer = Block(LayerNorm, gated=False, kv_heads=4, p=0.0, group=group, sequence_parallel=sp)
    for _ in range(2):  # the first does what only a group's first collectives do
        x = torch.randn(*((16 // comm.size, 8) if sp else (2, 8, 8)), requires_grad=True)
        marks = [(comm.sequence, comm.bytes_sent)]
        y = layer(x, (2, 8))
        marks.append((comm.sequence, comm.bytes_sent))
        y.sum().backward()
        marks.append((comm.sequence, comm.bytes_sent))
        found = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_and_bytes_of_a_block(world, size: int):
    """Two all-reduces of every activation each way. Under sequence parallelism two gathers and two
    reduce_scatters each way, half of an all-reduce each, and the columns' inputs gathered once more
    in backward."""
    half = 16 * 8 * 4 * (size - 1) // size
    assert world(size).run(traffic, False) == [[(2, 4 * half), (2, 4 * half)]] * size
    assert world(size).run(traffic, True) == [[(4, 4 * half), (6, 6 * half)]] * size


def embedded(rank: int, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
    ranks, tokens = Ranks.of(group), torch.tensor([[0, 6, 3, 6], [2, 5, 1, 6]])
    whole = randomise(nn.Embedding(7, 3)).to(dtype)
    dy = torch.randn(2, 4, 3).to(dtype)
    whole(tokens).backward(dy)
    for sp in (False, True):
        layer = VocabParallelEmbedding(7, 3, group=group, sequence_parallel=sp).to(dtype)
        place = layer.placements["weight"]
        with torch.no_grad():
            layer.weight.copy_(place.take(whole.weight))
        y = layer(tokens)
        y.backward(tokens_of(dy, ranks) if layer.sequence_parallel else dy)
        expected = whole(tokens).detach()
        assert torch.equal(y, tokens_of(expected, ranks) if layer.sequence_parallel else expected)
        torch.testing.assert_close(
            layer.weight.grad, place.take(whole.weight.grad), rtol=1e-6, atol=0.0
        )
        assert place.start == place.stop or layer.weight.grad.any()
        for wrong in (-1, 7):
            with pytest.raises(
                ValueError, match=f"token {wrong} at .1, 2. is outside the vocabulary of 7: 0 to 6"
            ):
                layer(torch.tensor([[0, 1, 2], [3, 4, wrong]]))


def embedding_traffic(rank: int, group: dist.ProcessGroup, sp: bool) -> list[tuple[int, int]]:
    """(collectives, bytes) of forward and backward of 12 tokens, 4 wide, in fp32."""
    layer, comm = (
        VocabParallelEmbedding(7, 4, group=group, sequence_parallel=sp),
        Communicator.of(group),
    )
    layer(torch.zeros(1, 12, dtype=torch.int64)).sum().backward()
    marks = [(comm.sequence, comm.bytes_sent)]
    y = layer(torch.zeros(1, 12, dtype=torch.int64))
    marks.append((comm.sequence, comm.bytes_sent))
    y.sum().backward()
    marks.append((comm.sequence, comm.bytes_sent))
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]


def test_collectives_and_bytes_of_an_embedding(world):
    half = 12 * 4 * 4 // 2
    assert world(2).run(embedding_traffic, False) == [[(1, 2 * half), (0, 0)]] * 2
    assert world(2).run(embedding_traffic, True) == [[(1, half), (1, half)]] * 2


@pytest.mark.cpu_only
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_embedding(world, size: int):
    if size == 1:
        embedded(0, None, torch.float32)
        return
    world(size).run(embedded, torch.float32)


@pytest.mark.cpu_only
def test_embedding_is_exact_in_bf16(world):
    world(3).run(embedded, torch.bfloat16)


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_with_and_without_residual(dtype: torch.dtype):
    x, residual = torch.randn(5, 8).to(dtype), torch.randn(5, 8).to(dtype)
    ours, theirs = (randomise(norm(8)).to(dtype) for norm in (LayerNorm, nn.LayerNorm))
    torch.testing.assert_close(ours(x), theirs(x))
    y, total = ours(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(y, theirs(x + residual))
    ours, theirs = (randomise(norm(8, eps=1e-6)).to(dtype) for norm in (RMSNorm, nn.RMSNorm))
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours(x, residual)[0], theirs(x + residual))
    shifted = RMSNorm(8, offset=1.0).to(dtype)
    assert not shifted.weight.any()
    torch.testing.assert_close(shifted(x), functional.rms_norm(x, (8,), eps=1e-6))


def masks(rank: int, group: dist.ProcessGroup | None, sp: bool) -> Tensor:
    layer = nn.ModuleDict({"inner": Dropout(0.5, width=4, group=group, sequence_parallel=sp)})
    set_dropout(layer, seed=1, step=9, shape=(3, 5), first_row=2)
    ranks = Ranks.of(group)
    return layer["inner"](tokens_of(torch.ones(3, 5, 4), ranks) if sp else torch.ones(3, 5, 4))


def test_dropout_draws_the_global_batch(world):
    expected = (
        random.dropout_mask(
            1, "inner@9", (3, 5, 4), p=0.5, offset=(2, 0, 0), global_shape=(5, 5, 4)
        )
        * 2.0
    )
    assert 0 < expected.sum() < 2 * expected.numel()
    assert torch.equal(masks(0, None, False), expected)
    assert all(torch.equal(found, expected) for found in world(2).run(masks, False))
    parts = torch.cat(world(2).run(masks, True))[:15]
    assert torch.equal(parts.view(3, 5, 4), expected)


def test_dropout_wants_a_state_in_training_only():
    layer = Dropout(0.5, width=4)
    with pytest.raises(RuntimeError, match="set_dropout"):
        layer(torch.ones(2, 4))
    x = torch.ones(2, 4)
    assert torch.equal(layer.eval()(x, torch.ones(4), x), torch.full((2, 4), 3.0))
    with pytest.raises(ValueError, match=r"p is 1.0"):
        Dropout(1.0, width=4)
    with pytest.raises(ValueError, match="choose one of gelu, gelu_tanh, relu, silu"):
        configured(ParallelMLP, 4, 8, activation="swish")


@pytest.mark.full
@pytest.mark.real_device
def test_one_rank_alone_compiles_in_one_graph():
    block = Block(LayerNorm, gated=False, kv_heads=2, p=0.3)
    table = VocabParallelEmbedding(11, 8)
    set_dropout(block, seed=3, step=7, shape=(2, 4))

    def forward(tokens: Tensor) -> Tensor:
        return block(table(tokens), (2, 4))

    tokens = torch.randint(11, (2, 4))
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), forward(tokens))
    first = forward(tokens)
    set_dropout(block, seed=3, step=8, shape=(2, 4))
    torch.testing.assert_close(
        compiled(tokens), forward(tokens)
    )  # the new state, not the one of the first call
    assert not torch.equal(first, forward(tokens))


def copied(rank: int, group: dist.ProcessGroup) -> None:
    layer = Block(LayerNorm, gated=True, kv_heads=4, p=0.0, group=group)
    other = copy.deepcopy(layer)
    x = torch.randn(1, 4, 8)
    assert torch.equal(other(x, (1, 4)), layer(x, (1, 4)))
    assert other.mlp.up.weight is not layer.mlp.up.weight
    assert set(Placement.of(layer)) == {name for name, _ in layer.named_parameters()}
    sync_partial_grads(other, group=group)


def test_a_layer_can_be_copied_and_places_every_parameter(world):
    world(2).run(copied)
