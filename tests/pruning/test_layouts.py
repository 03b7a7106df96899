"""The same mask, to the bit, whoever holds which part of the model, and masks that go from one
layout to another."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.mesh import ALONE, Axes, Mesh
from pyops.models import GPT, GPTConfig
from pyops.optim import AdamW
from pyops.parallel import ParallelPlan, parallelize
from pyops.pruning import Masks, hold, magnitude, masks_from_state, masks_state
from pyops.tensor_parallel import RowParallelLinear
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import full
from tests.parallel.test_trainer import rows_for
from tests.parallel.tiny_transformers import make_model

pytestmark = pytest.mark.cpu_only

CONFIG = GPTConfig(
    vocab_size=22, sequence_length=8, num_layers=2, num_heads=4, dim=16, hidden=20, bias=True
)
SCOPES: dict[str, dict[str, Any]] = {
    "layer": {"sparsity": 0.7},
    "global": {"sparsity": 0.9, "scope": "global", "least": 0.02},
    "rows": {"sparsity": 0.4, "scope": "rows"},
    "padded": {"sparsity": 0.6, "scope": "global", "only": ["*"]},
}
Bits = dict[str, Tensor]


def gpt(group: Any) -> GPT:
    """Of few different values, so that many are equal at every threshold."""
    model = GPT(CONFIG, group=group, seed=3)
    for p in model.parameters():
        p.data.mul_(64).round_().div_(64)
    return model


class Stage(nn.Module):
    """The blocks of one stage, named as in the whole model."""

    def __init__(self, whole: GPT, part: int, parts: int) -> None:
        super().__init__()
        numbers = range(part * 2 // parts, (part + 1) * 2 // parts)
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in numbers})
        if part == 0:
            self.embedding = whole.embedding


def bits_of(model: nn.Module, group: Any, options: dict[str, Any], optimizer: Any = None) -> Bits:
    masks = magnitude(model, **options, optimizer=optimizer, group=group)
    state = masks_state(masks, group=group)
    masks.release()
    return state["bits"]


def in_one_process(scopes: Sequence[str], *, only_blocks: bool = False) -> dict[str, Bits]:
    def model() -> nn.Module:
        return Stage(gpt(ALONE), 0, 1) if only_blocks else gpt(ALONE)

    return {name: bits_of(model(), ALONE, SCOPES[name]) for name in scopes}


def differing(found: Bits, expected: Bits) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if not found[name].equal(expected[name])]


def of_layouts(rank: int, group: dist.ProcessGroup, scopes: list[str]) -> list[str]:
    """What differs from one process: nothing."""
    size, wrong = group.size(), []
    whole = in_one_process(scopes)

    def compare(label: str, model: nn.Module, expected: Bits, scope: str, optimizer: Any = None):
        found = bits_of(model, group, SCOPES[scope], optimizer)
        wrong.extend(f"{label} {scope}: {name}" for name in differing(found, expected))

    alive = {n: masks_from_state(gpt(ALONE), _state(b), group=ALONE) for n, b in whole.items()}
    for scope in scopes:
        compare("data parallel", gpt(ALONE), whole[scope], scope)
        for stage in (0, 1, 2, 3) if size == 2 else (3,):
            model = gpt(ALONE)
            zero = ZeroOptimizer(model, AdamW, ZeroConfig(stage=stage), group=group, lr=0.1)
            compare(f"ZeRO {stage}", model, whole[scope], scope, zero)
            with zero.whole_parameters():
                weights = {n: p.detach().clone() for n, p in model.named_parameters()}
            for name, mask in alive[scope].items():
                assert not weights[name][~mask.alive()].any(), "pruned weights are 0"
            zero.close()
        if size in (2, 4):
            compare("tensor parallel", gpt(group), whole[scope], scope)
    if size == 2:
        stages = in_one_process(scopes, only_blocks=True)
        for scope in scopes:
            compare("pipeline", Stage(gpt(ALONE), rank, 2), stages[scope], scope)
    if size == 4:
        mesh = Mesh(Axes(dp=2, tp=2))
        for scope in scopes:
            model = gpt(mesh.group("tp"))
            config = ZeroConfig(stage=3)
            zero = ZeroOptimizer(model, AdamW, config, mesh=mesh, lr=0.1)
            compare("ZeRO 3 by tensor parallel", model, whole[scope], scope, zero)
            zero.close()
    return wrong


def tied_rows(rank: int, group: dist.ProcessGroup) -> list[int]:
    """Which rows stay of 16 of the same 2,048 numbers, each in an order of its own. Their squares
    sum up to one number of 35 bits: exact in float64, and not in fp32, part by part."""
    generator = torch.Generator().manual_seed(4)
    numbers = torch.randint(2048, 4096, (2048,), generator=generator) / 4096
    rows = [numbers[torch.randperm(2048, generator=generator)] for _ in range(16)]
    layer = RowParallelLinear(2048, 16, bias=False, group=group)
    layer.weight.data.copy_(layer.placements["weight"].take(torch.stack(rows)))
    masks = magnitude(layer, 0.5, scope="rows", only=["weight"], group=group)
    return masks["weight"].alive().all(1).nonzero().view(-1).tolist()


def test_norms_of_rows_do_not_depend_on_who_holds_them(world):
    assert world(2).run(tied_rows) == [list(range(8))] * 2


def _state(bits: Bits) -> dict[str, Any]:
    model = gpt(ALONE)
    alive = {n: torch.ones(model.get_parameter(n).shape, dtype=torch.bool) for n in bits}
    masks = Masks(model, alive)
    state = masks_state(masks, group=ALONE)
    return {**state, "bits": bits}


@pytest.mark.parametrize("size", [full(2), full(3), 4])
def test_the_same_bits_on_every_layout(world, size: int):
    scopes = {2: list(SCOPES), 3: ["global"], 4: ["padded"]}[size]
    for wrong in world(size).run(of_layouts, scopes):
        assert wrong == []


LLAMA = {"sparsity": 0.6, "scope": "global"}
PLANS = {"tp 2": ParallelPlan(tp=2), "pp 2, zero 1": ParallelPlan(pp=2, zero=ZeroConfig(stage=1))}


def of_plans(rank: int, group: dist.ProcessGroup) -> list[str]:
    """A Hugging Face model on a plan: masks of one process, and zeros that stay."""
    expected, wrong = bits_of(make_model("llama"), ALONE, LLAMA), []
    for name, plan in PLANS.items():
        adam = functools.partial(AdamW, lr=1e-2, weight_decay=0.1)
        trainer = parallelize(make_model("llama"), plan, optimizer=adam)
        model = trainer.parts.model
        masks = magnitude(model, **LLAMA, optimizer=trainer.optimizer, group=group)
        before = {n: masks.parameter(n).detach().clone() for n in masks}
        found = masks_state(masks, group=group)["bits"]
        wrong.extend(f"{name}: {each}" for each in differing(found, expected))
        with hold(masks, trainer.optimizer):
            for step in range(3):
                trainer.step(rows_for("llama", step))
        for each, mask in masks.items():
            weight = masks.parameter(each).detach()
            assert not weight[~mask.alive()].any()
            assert not weight.equal(before[each])
        trainer.optimizer.close()
    return wrong


@pytest.mark.full
def test_models_on_plans(world):
    for wrong in world(2).run(of_plans):
        assert wrong == []


def moved(rank: int, group: dist.ProcessGroup) -> None:
    """Masks saved by one layout, taken up by another."""
    whole = in_one_process(["padded"])["padded"]
    model = gpt(group)
    masks = Masks(model, masks_from_state(model, _state(whole), group=group))
    assert differing(masks_state(masks, group=group)["bits"], whole) == []
    alone = gpt(ALONE)
    state = masks_state(masks, group=group)
    back = Masks(alone, masks_from_state(alone, state, group=ALONE))
    assert differing(masks_state(back, group=ALONE)["bits"], whole) == []


def test_masks_go_from_layout_to_layout(world):
    world(2).run(moved)


def refused(rank: int, group: dist.ProcessGroup) -> list[str]:
    """One rank's mistake is every rank's error, and nothing is changed."""
    found = []
    model = gpt(ALONE)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        if rank == 1:
            model.blocks[0].mlp.down.weight[0, 0] = torch.nan
    for options in ({"sparsity": 0.5}, {"sparsity": 0.5 + 0.6 * rank}, {"sparsity": rank / 2}):
        try:
            magnitude(model, **options, group=group)
        except ValueError as error:
            found.append(str(error))
    try:
        magnitude(gpt(group), 0.5, group=ALONE)
    except ValueError as error:
        found.append(str(error))
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.equal(old) or (rank == 1 and p.isnan().any())
    return found


def test_errors_are_those_of_all_ranks(world):
    first, second = world(2).run(refused)
    assert first == second
    assert "1 of the numbers that rank blocks.0.mlp.down.weight are nan" in first[0]
    assert "sparsity is 1.1" in first[1]
    assert "sparsity is 0.0 on rank 0, but 0.5 on rank 1" in first[2]
    assert "give the group of all ranks that have the model together" in first[3]
