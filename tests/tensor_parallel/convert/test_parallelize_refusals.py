"""What parallelize refuses: with the same words on every rank, and the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops.mesh import ALONE
from pyops.tensor_parallel import parallelize
from tests.tensor_parallel.convert.existing_models import PLAN, Mixed, Torch

pytestmark = pytest.mark.cpu_only


def without(*patterns: str, **more: str) -> dict[str, str]:
    return {**{key: kind for key, kind in PLAN.items() if key not in patterns}, **more}


def mixed(rank: int) -> nn.Module:
    torch.manual_seed(1)
    return Mixed()


def hooked(rank: int) -> nn.Module:
    model = mixed(rank)
    model.words.register_forward_hook(lambda *_: None)
    return model


def odd(rank: int) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 1), 1)


def other_values(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return Mixed()


def other_size(rank: int) -> nn.Module:
    model = mixed(rank)
    if rank:
        model.extra = nn.Parameter(torch.ones(2))
    return model


def parallel(rank: int) -> nn.Module:
    model = mixed(rank)
    parallelize(model, group=ALONE, plan=PLAN, check=False)
    return model


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def own_linear(rank: int) -> nn.Module:
    model = mixed(rank)
    model.stack[1]["ffn"][0] = Scaled(24, 30)
    return model


def keyed(rank: int) -> nn.Module:
    model = Torch(0.0)
    model.encoder.layers[0].self_attn = nn.MultiheadAttention(24, 4, kdim=12)
    return model


Make = Callable[[int], nn.Module]
CASES: dict[str, tuple[Make, Mapping[str, str] | None, dict[str, Any]]] = {
    "no plan is known for Mixed": (mixed, None, {}),
    "'blocks.*.attn' names no module of Mixed; it has words, stack, ": (
        mixed,
        {**PLAN, "blocks.*.attn": "attention"},
        {},
    ),
    "'rowwise'; choose one of columns, ": (mixed, without(head="rowwise"), {}),
    "the plan names no module of Mixed to cut": (mixed, {"mix": "attention"}, {}),
    "stack.0.ffn.0 fits ['ffn.0', 'ffn.*']": (mixed, {**PLAN, "ffn.*": "rows"}, {}),
    "stack.0.norm (LayerNorm) can't be cut as 'columns': that takes a torch.nn.Linear": (
        mixed,
        without(norm="columns"),
        {},
    ),
    "stack.1.ffn.0 (Scaled) can't be cut": (own_linear, PLAN, {}),
    "words (Embedding) can't be cut: it has hooks": (hooked, PLAN, {}),
    "stack.0.mix.norm has parameters within stack.0.mix": (mixed, without("mix.norm"), {}),
    "share a parameter must be cut alike, and the plan has words: vocabulary, head: whole": (
        mixed,
        without("head"),
        {},
    ),
    "1 heads in 1 groups can't be split over 2 ranks; 1 ranks can": (odd, None, {}),
    "20 -> 24) can't be cut as 'packed columns'": (
        mixed,
        {**PLAN, "mix.out": "packed columns"},
        {},
    ),
    "sequence_parallel=True needs a plan that says where tokens are shared out": (
        mixed,
        PLAN,
        {"sequence_parallel": True},
    ),
    "keys or values of another width (kdim, vdim) can't be cut": (keyed, None, {}),
    "the model is parallel already: words has placements": (parallel, PLAN, {}),
    "the ranks' models differ: words.weight": (other_values, PLAN, {}),
    "extra ([2], float32, ": (other_size, PLAN, {}),
}


def refused(rank: int, group: dist.ProcessGroup) -> list[str]:
    texts = []
    for make, plan, options in CASES.values():
        model = make(rank)
        before = {name: (id(module), type(module)) for name, module in model.named_modules()}
        values = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError) as caught:
            parallelize(model, group=group, plan=plan, **options)
        texts.append(str(caught.value))
        assert {
            name: (id(module), type(module)) for name, module in model.named_modules()
        } == before
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    for other in (
        {"plan": PLAN if rank else without("head")},
        {"gather_logits": rank == 0},
    ):  # on one rank only
        with pytest.raises(ValueError) as caught:
            parallelize(mixed(rank), group=group, **{"plan": PLAN, **other})
        texts.append(str(caught.value))
    with pytest.raises(TypeError):
        parallelize("model", group=group)
    with pytest.raises(TypeError, match=r"plan is a list"):
        parallelize(mixed(rank), group=group, plan=[("head", "columns")])  # type: ignore[arg-type]
    return texts


def test_refusals_on_every_rank(world):
    first, second = world(2).run(refused)
    assert first == second
    for expected, text in zip(
        [*CASES, "must be cut alike", "gather_logits (True) on rank 0"], first, strict=True
    ):
        assert expected in text


class ByLayer:
    """A configuration of transformers whose layers differ: it raises an error of its own, which is
    no AttributeError."""

    num_attention_heads = 4

    @property
    def num_key_value_heads(self) -> int:
        raise RuntimeError("it may vary across layers")


def test_numbers_of_heads_that_a_configuration_does_not_tell_are_refused():
    model = nn.ModuleDict({"attn": nn.ModuleDict({"q": nn.Linear(8, 8), "o": nn.Linear(8, 8)})})
    model["attn"].config = ByLayer()
    with pytest.raises(
        ValueError, match="does not tell one num_key_value_heads: it may vary across layers"
    ):
        parallelize(model, plan={"attn": "attention", "attn.q": "columns", "attn.o": "rows"})
