"""What a group means: None is the default process group for layers and functions, and ALONE, the
default of models, is this rank whatever runs beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops.mesh import ALONE, Axes, Mesh
from pyops.models import (
    BERT,
    GPT,
    T5,
    BERTClassifier,
    BERTConfig,
    GPTConfig,
    T5Config,
    ViT,
    ViTConfig,
)
from pyops.tensor_parallel import (
    AttentionConfig,
    ColumnParallelLinear,
    Dropout,
    LayerNorm,
    ParallelAttention,
    ParallelMLP,
    Ranks,
    RelativeBias,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    grad_norm,
    parallelize,
    sync_partial_grads,
)
from pyops.tensor_parallel.functional import regions

pytestmark = pytest.mark.cpu_only

SHAPE: dict[str, int] = {"num_layers": 1, "num_heads": 2, "dim": 8}


def sizes(rank: int, group: dist.ProcessGroup) -> dict[str, list[int]]:
    """Local sizes of each layer for a group that is left out, ALONE, a mesh, and the group."""
    found: dict[str, list[int]] = {}
    ways: list[dict[str, Any]] = [{}, {"group": ALONE}, {"group": Mesh(Axes(tp=2))}]
    for way in [*ways, {"group": group}]:
        for name, layer in (
            ("column", ColumnParallelLinear(8, 8, **way)),
            ("row", RowParallelLinear(8, 8, **way)),
            ("mlp", ParallelMLP(4, 8, **way).up),
            ("attention", ParallelAttention(4, 2, **way).qkv),
            ("embedding", VocabParallelEmbedding(8, 8, **way)),
            ("bias", RelativeBias(4, **way)),
        ):
            found.setdefault(name, []).append(layer.weight.numel())
        for name, ranks in (
            ("dropout", Dropout(0.1, width=2, **way).ranks.size),
            ("norm", LayerNorm(2, **way).placements["weight"].copies),
            ("rms norm", RMSNorm(2, **way).placements["weight"].copies),
            ("ranks", Ranks.of(way.get("group")).size),
            ("reduce", int(regions.reduce(torch.ones(()), **way))),
        ):
            found.setdefault(name, []).append(ranks)
    return found


def test_layers_are_cut_over_the_default_group_and_whole_alone(world):
    for found in world(2).run(sizes):
        assert found["column"] == [32, 64, 32, 32]
        for name, (default, alone, mesh, given) in found.items():
            assert default == mesh == given, name
            assert default in (alone // 2, alone * 2), (name, default, alone)


def models(rank: int, group: dist.ProcessGroup) -> list[list[int]]:
    """Elements of each model without a group, with ALONE, and over the default group."""
    makers: list[Any] = [
        lambda **way: GPT(GPTConfig(**SHAPE), **way),
        lambda **way: BERT(BERTConfig(**SHAPE), **way),
        lambda **way: BERTClassifier(BERTConfig(**SHAPE), num_labels=3, **way),
        lambda **way: T5(T5Config(**SHAPE), **way),
        lambda **way: ViT(ViTConfig(**SHAPE), **way),
    ]
    found = []
    for make in makers:
        ways: list[dict[str, Any]] = [{}, {"group": ALONE}, {"group": None}]
        found.append([sum(p.numel() for p in make(**way).parameters()) for way in ways])
    model = GPT(GPTConfig(vocab_size=16, sequence_length=4, **SHAPE))
    tokens = torch.full((1, 4), rank)  # other tokens on each rank: nothing may be communicated
    model.loss(tokens, tokens).backward()
    sync_partial_grads(model, group=ALONE)
    assert float(grad_norm(model, group=ALONE)) > 0
    return found


def test_a_model_that_is_given_no_group_is_whole(world):
    for found in world(2).run(models):
        for without, alone, cut in found:
            assert without == alone > cut


def converted(rank: int, group: dist.ProcessGroup) -> list[int]:
    found = []
    ways: list[dict[str, Any]] = [{}, {"group": ALONE}]
    for way in ways:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        parallelize(model, plan={"2": "rows"}, check=False, **way)
        found.append(model[2].weight.numel())
    return found


def test_parallelize_cuts_over_the_default_group(world):
    assert world(2).run(converted) == [[16, 32]] * 2


def test_keywords_that_moved_are_refused():
    with pytest.raises(TypeError, match=r"config=AttentionConfig\(causal=True, dropout=0.1\)"):
        ParallelAttention(8, 2, causal=True, dropout=0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"config=MLPConfig\(gated=True\)"):
        ParallelMLP(8, 8, gated=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="VocabParallelEmbedding has no argument rows"):
        VocabParallelEmbedding(8, 8, rows=3)  # type: ignore[arg-type]
    assert not AttentionConfig().causal
