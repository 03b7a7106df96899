"""What a plan refuses, with the option and its value."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from pyops.mesh import Axes, Mesh
from pyops.parallel import ParallelPlan, PipelineOptions, parallelize
from pyops.parallel.model_checks import check_mesh, check_model
from pyops.zero import ZeroConfig
from pyops.zero.layout.parameters import FlatParameters
from tests.grids import full
from tests.parallel.tiny_transformers import make_model

pytestmark = pytest.mark.cpu_only

REFUSED = {
    "tp": (ParallelPlan(tp=0), ("tp", "0")),
    "cp": (ParallelPlan(cp=0), ("cp", "0")),
    "method": (ParallelPlan(cp=2, cp_method="all"), ("cp_method", "'all'", "gather")),
    "order": (ParallelPlan(cp=2, cp_order="balanced"), ("cp_order", "'balanced'", "zigzag")),
    "no rows": (ParallelPlan(cp_method="ring"), ("cp_method is 'ring'", "cp is 1")),
    "pp": (ParallelPlan(pp=True), ("pp", "True")),
    "dp": (ParallelPlan(dp=-1), ("dp", "-1")),
    "microbatches": (ParallelPlan(num_microbatches=0), ("num_microbatches", "0")),
    "precision": (ParallelPlan(precision="fp8"), ("precision", "fp8", "bf16")),
    "recompute": (ParallelPlan(recompute="blocks.*"), ("recompute", "blocks.*")),  # type: ignore[arg-type]
    "schedule": (
        ParallelPlan(pp=2, pipeline=PipelineOptions("2f2b")),
        ("schedule", "2f2b", "1f1b"),
    ),
    "stages": (
        ParallelPlan(pp=2, pipeline=PipelineOptions(stages_per_rank=2)),
        ("stages_per_rank", "1f1b", "interleaved"),
    ),
    "no pipeline": (ParallelPlan(pipeline=PipelineOptions("gpipe")), ("pp is 1", "gpipe")),
    "two ways": (ParallelPlan(pp=2, num_microbatches=3), ("num_microbatches", "3")),
    "gather once": (
        ParallelPlan(pp=2, pipeline=PipelineOptions(gather_once=True)),
        ("gather_once", "zero.stage"),
    ),
    "zero option": (ParallelPlan(zero=ZeroConfig(stage=5)), ("zero.stage", "5")),
    "clipping twice": (
        ParallelPlan(zero=ZeroConfig(max_grad_norm=1.0)),
        ("max_grad_norm", "ParallelPlan"),
    ),
    "reduction": (ParallelPlan(zero=ZeroConfig(reduction="sum")), ("reduction", "sum")),
    "norm": (ParallelPlan(max_grad_norm=0.0), ("max_grad_norm", "0.0")),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_plan_that_makes_no_sense_is_refused(name):
    plan, words = REFUSED[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        plan.validate()
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_mesh_of_a_plan():
    assert ParallelPlan(tp=2, pp=2).axes(8).degrees() == {"pp": 2, "dp": 2, "cp": 1, "tp": 2}
    assert ParallelPlan(dp=3).axes(3).size == 3
    for plan, ranks in ((ParallelPlan(tp=2), 3), (ParallelPlan(dp=2), 4)):
        with pytest.raises(ValueError, match=f"{ranks} run"):
            plan.axes(ranks)


def test_two_microbatches_for_each_rank_where_nothing_is_said():
    plan = ParallelPlan(pp=2)
    assert plan.microbatches == plan.schedule().num_microbatches == 4
    assert ParallelPlan(num_microbatches=3).microbatches == 3
    assert ParallelPlan(pp=2, pipeline=PipelineOptions("zbv")).num_stages == 4


def test_parallelize_refuses_what_is_no_model_plan_or_optimizer():
    layer = torch.nn.Linear(2, 2)
    for arguments, words in (
        ({"model": 3, "optimizer": torch.optim.AdamW}, ("model", "int")),
        ({"model": layer, "plan": 2, "optimizer": torch.optim.AdamW}, ("plan", "2")),
        ({"model": layer, "optimizer": 3}, ("optimizer", "3")),
        (
            {"model": layer, "optimizer": torch.optim.SGD(layer.parameters(), lr=1.0)},
            ("SGD", "made already"),
        ),
        (
            {"model": layer.requires_grad_(False), "optimizer": torch.optim.AdamW},
            ("nothing to train",),
        ),
        (
            {"model": torch.nn.DataParallel(torch.nn.Linear(2, 2)), "optimizer": torch.optim.AdamW},
            ("wrapped", "DataParallel"),
        ),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            parallelize(**arguments)
        assert all(word in str(caught.value) for word in words), caught.value


def refused_late(rank: int, group: object, arguments: dict[str, Any]) -> tuple[str, bool]:
    """What is said, and whether the model is as it was."""
    model = make_model("gpt2").eval()
    expected = model(**example()).logits
    kinds = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises((ValueError, TypeError)) as caught:
        parallelize(model, **{"optimizer": torch.optim.AdamW, **arguments})
    same = kinds == [(name, type(module)) for name, module in model.named_modules()]
    return str(caught.value), same and torch.equal(model(**example()).logits, expected)


def example() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(6).view(1, 6)}


LATE: dict[str, tuple[dict[str, Any], str]] = {
    "no module": ({"plan": ParallelPlan(tp=2, recompute=("layers.*",))}, "layers.*"),
    "no optimizer": ({"plan": ParallelPlan(pp=2), "optimizer": int}, "optimizer"),
    "too many stages": (
        {"plan": ParallelPlan(pp=2, pipeline=PipelineOptions("interleaved", stages_per_rank=3))},
        "6 stages",
    ),
    "heads": ({"plan": ParallelPlan(tp=2, tensor_parallel={"attn": "rows"})}, "attn"),
}


@pytest.mark.parametrize("name", list(LATE))
def test_what_is_refused_leaves_the_model_as_it_was(name, world):
    arguments, word = LATE[name]
    for said, same in world(2).run(refused_late, arguments):
        assert word in said
        assert same


def test_a_model_of_another_trainer_is_refused():
    model = make_model("llama")
    parallelize(model, optimizer=torch.optim.AdamW)
    with pytest.raises(ValueError, match="already"):
        parallelize(model, optimizer=torch.optim.AdamW)


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "plan": (
        {"plan": ParallelPlan(zero=ZeroConfig(stage=1))},
        {"plan": ParallelPlan(zero=ZeroConfig(stage=2))},
        ("plan.zero", "stage=1", "stage=2"),
    ),
    "way of attention": (
        {"plan": ParallelPlan(cp=2)},
        {"plan": ParallelPlan(cp=2, cp_method="ring")},
        ("plan.cp_method", "gather", "ring"),
    ),
    "seed": ({"seed": 1}, {"seed": 2}, ("seed", "1", "2")),
    "loss": ({}, {"loss": (lambda o, b: o, lambda b: 1)}, ("loss", "None")),
    "model": ({"model": "gpt2"}, {"model": "llama"}, ("GPT2LMHeadModel", "LlamaForCausalLM")),
    "mesh": ({}, {"mesh": 3}, ("mesh", "int", "pyops.mesh.Mesh")),
}


def refused_as_different(rank: int, group: object, name: str) -> str:
    first, second, _ = DIFFERENT[name]
    given = dict(first if rank == 0 else second)
    model = make_model(given.pop("model", "gpt2"))
    with pytest.raises((ValueError, TypeError)) as caught:
        parallelize(model, **{"optimizer": torch.optim.AdamW, **given})
    return str(caught.value)


@pytest.mark.parametrize("name", list(DIFFERENT))
def test_ranks_that_say_different_things_are_told_alike(name, world):
    said = world(2).run(refused_as_different, name)
    assert said[0] == said[1]
    assert all(word in said[0] for word in DIFFERENT[name][2]), said[0]


def out_of_memory(rank: int, group: object, stage: int) -> tuple[str, bool, float]:
    """What is said, whether the model is as it was, and the loss of the first step once there is
    memory."""
    model = make_model("gpt2").eval()
    expected = model(**example()).logits
    plan = ParallelPlan(pp=2, zero=ZeroConfig(stage=stage))
    lay_out, calls = FlatParameters.__init__, []

    def allocate(self: FlatParameters, *args: Any, **options: Any) -> None:
        calls.append(self)
        if rank == 3 and (stage < 3 or len(calls) == 4):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1 bytes")
        lay_out(self, *args, **options)

    with (
        mock.patch.object(FlatParameters, "__init__", allocate),
        pytest.raises(MemoryError) as caught,
    ):
        parallelize(model, plan, optimizer=torch.optim.AdamW)
    same = torch.equal(model(**example()).logits, expected)
    trainer = parallelize(model, plan, optimizer=torch.optim.AdamW)
    return (
        str(caught.value),
        same,
        trainer.step({**example(), "labels": torch.arange(6).view(1, 6)}),
    )


@pytest.mark.parametrize(("stage", "part"), [full(1, "the model"), (3, "transformer.h.3")])
def test_all_ranks_hear_of_one_that_has_no_memory_and_can_go_on(stage, part, world):
    said, same, losses = zip(*world(4).run(out_of_memory, stage), strict=True)
    assert all("no memory on cpu" in each and part in each for each in said), said
    assert all(same)
    assert len(set(losses)) == 1


def test_a_mesh_and_a_model_that_share_rows_out_otherwise_are_refused() -> None:
    mesh = Mesh(Axes())
    check_mesh(mesh, ParallelPlan())
    mesh.axes = Axes(cp=2)  # as on two ranks
    check_mesh(mesh, ParallelPlan(cp=2))
    with pytest.raises(ValueError, match="2 ranks along 'cp', but the plan's cp is 1"):
        check_mesh(mesh, ParallelPlan())
    assert ParallelPlan(cp=2, tp=2).axes(8).degrees() == {"pp": 1, "dp": 2, "cp": 2, "tp": 2}
    with pytest.raises(ValueError, match="tp 1 x pp 1 x cp 2 = 2 ranks or a multiple, but 3 run"):
        ParallelPlan(cp=2).axes(3)
    for plan, words in (
        (ParallelPlan(cp=8, cp_method="ulysses"), "4 heads over tp 1: set cp to 4 or less"),
        (ParallelPlan(cp=2, tp=4, cp_method="ulysses"), "4 heads over tp 4: set cp to 1"),
    ):
        with pytest.raises(ValueError, match=words):
            check_model(make_model("llama"), plan)
    check_model(make_model("llama"), ParallelPlan(cp=4, cp_method="ulysses"))
