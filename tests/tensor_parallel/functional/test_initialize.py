"""Parameters drawn by place: the ranks' parts put together are, bit for bit, the tensors of one
rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops import random
from pyops.flat import Placement
from pyops.mesh import ALONE
from pyops.tensor_parallel import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelAttention,
    ParallelMLP,
    RelativeBias,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize_,
    initialize_model_,
)
from tests.tensor_parallel.shared_layers import configured

pytestmark = pytest.mark.on_device


def build(
    group: dist.ProcessGroup | None, seed: int | None = 4, dtype: torch.dtype | None = None
) -> nn.ModuleDict:
    how = {"group": group, "seed": seed, "dtype": dtype}
    return nn.ModuleDict(
        {
            "attention": configured(ParallelAttention, 8, 4, name="attention", **how),
            "groups": configured(ParallelAttention, 8, 4, num_kv_heads=1, name="groups", **how),
            "cross": configured(
                ParallelAttention, 8, 5, head_dim=2, cross=True, memory_dim=6, name="cross", **how
            ),
            "mlp": configured(ParallelMLP, 8, 13, gated=True, name="mlp", out_std=0.01, **how),
            "embedding": configured(VocabParallelEmbedding, 11, 8, name="embedding", **how),
            "distance": configured(RelativeBias, 5, name="distance", **how),
            "column": configured(ColumnParallelLinear, 8, 7, name="column", **how),
            "row": configured(RowParallelLinear, 7, 8, name="row", **how),
            "norm": LayerNorm(8, group=group, dtype=dtype),
            "rms": RMSNorm(8, group=group, dtype=dtype),
        }
    )


def is_part_of(whole: nn.Module, mine: nn.Module) -> None:
    placements, tensors = Placement.of(mine), dict(whole.named_parameters())
    assert set(tensors) == set(placements) == {name for name, _ in mine.named_parameters()}
    for name, parameter in mine.named_parameters():
        assert torch.equal(parameter, placements[name].take(tensors[name])), name


def parts(rank: int, group: dist.ProcessGroup) -> bool:
    for dtype in (torch.float32, torch.bfloat16):
        is_part_of(build(ALONE, dtype=dtype), build(group, dtype=dtype))
    mine, whole = build(group, None), build(ALONE, None)
    for model in (mine, whole):
        initialize_model_(
            model, seed=7, std=lambda name: 0.5 if name.startswith("row") else 0.1, prefix="model."
        )
    is_part_of(whole, mine)
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_bitwise_those_of_one_rank(world, size: int):
    if size != 3:
        world(size).run(parts)
        return
    world(size).run(parts_of_three)


def parts_of_three(rank: int, group: dist.ProcessGroup) -> bool:
    """Four heads in one group can't be split over three ranks."""
    layers = {
        "mlp": lambda g: configured(ParallelMLP, 8, 13, gated=True, group=g),
        "table": lambda g: VocabParallelEmbedding(11, 8, group=g),
    }
    for make in layers.values():
        is_part_of(make(ALONE), make(group))
    return True


def test_streams_and_deviations():
    model = build(ALONE, None)
    initialize_model_(
        model, seed=7, std=lambda name: 0.5 if name.startswith("row") else 0.1, prefix="model."
    )
    expected = random.normal(7, "model.row.weight", (8, 7), std=0.5)
    assert torch.equal(model["row"].weight, expected)
    assert torch.equal(
        model["mlp"].up.weight, random.normal(7, "model.mlp.up.weight", (2, 13, 8), std=0.1)
    )
    assert not model["row"].bias.any()
    assert bool((model["norm"].weight == 1).all())
    assert not model["norm"].bias.any()
    drawn = build(ALONE)
    assert torch.equal(
        drawn["mlp"].down.weight, random.normal(4, "mlp.down.weight", (8, 13), std=0.01)
    )
    assert torch.equal(
        drawn["groups"].kv.weight, random.normal(4, "groups.kv.weight", (4, 8), std=0.02)
    )


def test_padding_is_zero_and_a_constant_has_no_stream():
    place = Placement.cut((5, 3), dim=0, rank=1, ranks=2)
    local = initialize_(torch.full((3, 3), torch.nan), seed=1, name="w", placement=place)
    assert torch.equal(local[:2], random.normal(1, "w", (5, 3), std=0.02)[3:])
    assert not local[2:].any()
    assert torch.equal(
        initialize_(torch.empty(4), seed=1, name="b", std=0.0, mean=1.0), torch.ones(4)
    )


def largest(rank: int, group: dist.ProcessGroup) -> int:
    """Elements of the largest tensor made while a layer is constructed."""
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            sizes.extend(
                t.numel()
                for t in (result if isinstance(result, tuple) else (result,))
                if isinstance(t, Tensor)
            )
            return result

    with Watch():
        build(group)
        ParallelMLP(64, 256, group=group)
        VocabParallelEmbedding(300, 64, group=group)
    return max(sizes)


def test_no_rank_builds_a_whole_tensor(world):
    assert world(2).run(largest) == [150 * 64] * 2
