"""A model that was written for several ranks has the losses of one process under every plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.mesh import Axes, Mesh
from pyops.models import GPT, GPTConfig
from pyops.optim import AdamW
from pyops.parallel import LayeredModel, ParallelPlan, PipelineOptions, Trainer, parallelize
from pyops.parallel.losses import padded_rows
from pyops.precision import LossScale
from pyops.zero import ZeroConfig
from tests.grids import full

pytestmark = pytest.mark.cpu_only

CONFIG = GPTConfig(
    vocab_size=12, sequence_length=5, num_layers=3, num_heads=2, dim=8, dropout=0.2, hidden=16
)
NAMES = ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")
STEPS, ROWS = 6, 7
PLANS = {
    "dp 2, zero 1": (2, ParallelPlan(zero=ZeroConfig(stage=1), num_microbatches=2)),
    "dp 2, zero 3": (2, ParallelPlan(zero=ZeroConfig(stage=3), num_microbatches=3)),
    "tp 2, recomputed": (
        2,
        ParallelPlan(tp=2, recompute=("blocks.*",), recompute_offload="cpu", num_microbatches=3),
    ),
    # 7 rows in 4 micro-batches: one more row that does not count
    "pp 2": (2, ParallelPlan(pp=2, pipeline=PipelineOptions("zb1p", num_microbatches=4))),
    "pp 2, boundaries": (
        2,
        ParallelPlan(pp=2, pipeline=PipelineOptions(boundaries=(0, 1, 5), recompute="always")),
    ),
    "tp 2 x pp 2": (4, ParallelPlan(tp=2, pp=2, sequence_parallel=True)),
    "pp 2 x dp 2, zero 3": (
        4,
        ParallelPlan(pp=2, pipeline=PipelineOptions(gather_once=True), zero=ZeroConfig(stage=3)),
    ),
}


class NatsPerRow:
    """The model's own loss, reported per row, while gradients are of the mean over the tokens."""

    def count(self, batch: dict[str, Any]) -> float:
        return float(len(batch["tokens_BT"]))

    def divisor(self, batch: dict[str, Any]) -> float:
        return float(batch["targets_BT"].numel())

    def sum(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        return outputs

    def padded(self, batch: dict[str, Any], rows: int) -> dict[str, Any]:
        return padded_rows(batch, rows, targets="targets_BT")


def layered(mesh: Mesh, plan: ParallelPlan, **changes: Any) -> LayeredModel:
    made = GPT(
        CONFIG, group=mesh, sequence_parallel=plan.sequence_parallel, seed=None, device="meta"
    )
    options: dict[str, Any] = {
        "names": NAMES,
        "costs": (0.0, 3.0, 3.0, 3.0, 1.0),
        "inputs": "tokens_BT",
        "initialize": lambda module: made.initialize(3, only=module),
        **changes,
    }
    return LayeredModel(made, **options)


def trainer_of(plan: ParallelPlan, ranks: int) -> Trainer:
    mesh = Mesh(plan.axes(ranks))
    return parallelize(
        layered(mesh, plan),
        replace(plan, max_grad_norm=1.0),
        optimizer=lambda params: AdamW(params, lr=0.02),
        mesh=mesh,
        loss=NatsPerRow(),
        seed=5,
    )


def rows_for(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, 12, (ROWS, 6), generator=generator).cumsum(1) % 12
    return {"tokens_BT": text[:, :-1], "targets_BT": text[:, 1:], "reduction": "sum"}


@cache
def straight() -> tuple[list[float], float]:
    """The losses of GPT alone, with torch's own AdamW, and that of rows held out."""
    model = GPT(CONFIG, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step in range(STEPS):
        batch = rows_for(step)
        model.set_dropout((ROWS, 5), seed=5, step=step)
        nats = model(**batch)
        (nats / (ROWS * 5)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(nats.item() / ROWS)
    with torch.no_grad():
        return losses, model.eval()(**rows_for(99)).item() / ROWS


def own_rows(batch: dict[str, Any], index: int, copies: int) -> dict[str, Any]:
    """Uneven shares: the first of two copies has more."""
    ends = [0, 5, ROWS] if copies == 2 else [0, ROWS]
    return {
        key: value[ends[index] : ends[index + 1]] if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }


def run(rank: int, group: object, plan: ParallelPlan, ranks: int) -> tuple[list[float], float]:
    trainer = trainer_of(plan, ranks)
    index, copies = trainer.mesh.rank("dp"), trainer.mesh.size("dp")
    losses = [
        trainer.step(own_rows(rows_for(step), index, copies), vote=step == 2 and rank == ranks - 1)
        for step in range(STEPS)
        if step != 2 or not trainer.vote
    ]
    assert not trainer.vote
    return losses, trainer.evaluate([own_rows(rows_for(99), index, copies)])


# Two axes each, of which one has copies at stage 3; what each does alone is in them.
IN_SUITE = ("tp 2 x pp 2", "pp 2 x dp 2, zero 3")


@pytest.mark.parametrize("name", [name if name in IN_SUITE else full(name) for name in PLANS])
def test_losses_are_those_of_the_model_alone(world, name):
    ranks, plan = PLANS[name]
    expected, held_out = straight()
    for losses, of_held_out in world(ranks).run(run, plan, ranks):
        assert losses == pytest.approx(expected, rel=2e-5)
        assert of_held_out == pytest.approx(held_out, rel=2e-5)


def votes(rank: int, group: object) -> list[bool]:
    trainer = trainer_of(ParallelPlan(pp=2), 2)
    found = []
    for step in range(3):
        trainer.step(rows_for(step), vote=step == 1 and rank == 1)
        found.append(trainer.vote)
    return found


def test_a_vote_of_one_rank_is_heard_by_all(world):
    assert world(2).run(votes) == [[False, True, False]] * 2


REFUSED: dict[str, tuple[ParallelPlan, dict[str, Any], tuple[str, ...]]] = {
    "another tp": (ParallelPlan(tp=2), {}, ("tp is 2", "made for 1 ranks")),
    "cut twice": (
        ParallelPlan(tensor_parallel={"blocks.*": "column"}),
        {},
        ("tensor_parallel", "leave it out"),
    ),
    "names": (ParallelPlan(), {"names": NAMES[1:]}, ("4 names", "5 layers")),
    "recompute": (ParallelPlan(recompute=("block.*",)), {}, ("recompute", "block.*")),
    "offload": (ParallelPlan(recompute_offload="disk"), {}, ("recompute_offload", "disk", "cpu")),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_plan_that_does_not_fit_is_refused(name):
    plan, changes, words = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        _refused(plan, changes)
    assert all(word in str(caught.value) for word in words), caught.value


def _refused(plan: ParallelPlan, changes: dict[str, Any]) -> None:
    model = layered(Mesh(Axes()), ParallelPlan(), **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelPlan, "axes", lambda self, ranks: Axes())
        parallelize(model, plan, optimizer=torch.optim.AdamW, loss=NatsPerRow())


def refused_stages(rank: int, group: object, options: PipelineOptions) -> str:
    plan = ParallelPlan(pp=2, pipeline=options)
    mesh = Mesh(plan.axes(2))
    with pytest.raises(ValueError, match=r"boundaries|stages") as caught:
        parallelize(
            layered(mesh, plan), plan, optimizer=torch.optim.AdamW, mesh=mesh, loss=NatsPerRow()
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (PipelineOptions(boundaries=(0, 6)), ("[0, 6]", "0 to 5", "layer")),
        (PipelineOptions("interleaved", stages_per_rank=3), ("6 stages", "5 layers")),
    ],
)
def test_stages_that_do_not_fit_are_refused_on_all_ranks(world, options, words):
    first, second = world(2).run(refused_stages, options)
    assert first == second
    assert all(word in first for word in words), first


def scaled(rank: int, group: object) -> tuple[float, int]:
    """A loss that overflows lowers the scale, as gradients that do."""
    scale = LossScale(initial=8.0, hysteresis=1)
    plan = ParallelPlan(pp=2, precision="fp16", zero=ZeroConfig(loss_scale=scale))
    mesh = Mesh(plan.axes(2))
    trainer = parallelize(layered(mesh, plan), plan, optimizer=AdamW, mesh=mesh, loss=Overflowing())
    trainer.step(rows_for(0))
    assert trainer.loss_scale is scale
    return scale.scale, trainer.skipped


def test_it_has_no_hugging_face_folder(tmp_path):
    trainer = parallelize(layered(Mesh(Axes()), ParallelPlan()), optimizer=AdamW, loss=NatsPerRow())
    with pytest.raises(TypeError, match=r"GPT .*no model of transformers.*save\(folder\)"):
        trainer.save_pretrained(tmp_path / "model")
    trainer.save(tmp_path / "checkpoint", place=3)
    assert trainer.load(tmp_path / "checkpoint") == {"place": 3}


class Overflowing(NatsPerRow):
    def sum(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        return outputs + float("inf")


def test_a_loss_scale_is_given_to_all_ranks_and_falls_with_the_loss(world):
    assert world(2).run(scaled) == [(4.0, 1)] * 2
