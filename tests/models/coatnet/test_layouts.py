"""A CoAtNet computes the same on one rank and on several: its blocks shared, its layers cut into
stages, its batch dealt out, its states cut."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pyops.flat import Placement
from pyops.mesh import ALONE, Mesh
from pyops.models import CoAtNet
from pyops.models.coatnet.costs import measured_costs
from pyops.optim import AdamW
from pyops.parallel import LayeredModel, ParallelPlan, PipelineOptions, Trainer, parallelize
from pyops.parallel.losses import padded_rows
from pyops.pipeline import balance
from pyops.tensor_parallel import grad_norm, sync_partial_grads
from pyops.zero import ZeroConfig
from tests.grids import full
from tests.models.coatnet.tiny import BATCH, config_of, images_of, make

pytestmark = pytest.mark.cpu_only

FOUR_HEADS = {"widths": (4, 8, 16, 16)}  # which 4 ranks can share
STEPS = 4
OPTIONS: dict[str, Any] = {"norm": "layer", "stochastic_depth": 0.2}
NAMES = ("stem", *(f"blocks.{i}" for i in range(6)), "head")


def gradients(model: CoAtNet, group: Any) -> dict[str, Any]:
    """{name: (whole shape, offset, this rank's part of the gradient)}, "loss" and "norm"."""
    model.set_dropout(BATCH, seed=9, step=3)
    loss = model.loss(*images_of())
    loss.backward()
    sync_partial_grads(model, group=group)
    placements = Placement.of(model)
    found: dict[str, Any] = {
        "loss": ((), (), loss.detach()),
        "norm": ((), (), grad_norm(model, group=group)),
    }
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        place = placements.get(name, Placement.whole(p.shape, rank=0, ranks=1))
        found[name] = (place.global_shape, place.offset, place.part(p.grad).clone())
    return found


def run_gradients(rank: int, group: Any, options: dict[str, Any]) -> dict[str, Any]:
    return gradients(make(group=group, stochastic_depth=0.3, **options), group)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"pre_norm_act": True}),
        (2, {"norm": "layer", "se_early": True, "stride_in": "expand"}),
        (2, {"tp_stages": (3, 4), "layer_scale": 0.5, "pre_norm_act": True}),
        (4, {**FOUR_HEADS, "pre_norm_act": True}),
        full(4, {**FOUR_HEADS, "norm": "layer"}),
        full(4, {**FOUR_HEADS, "tp_stages": (1, 4), "expand_from": "input", "norm": "layer"}),
    ],
)
def test_loss_and_gradients_are_those_of_one_rank(world, ranks, options):
    alone = {key: value for key, value in options.items() if key != "tp_stages"}
    wanted = gradients(make(stochastic_depth=0.3, **alone), ALONE)
    found = world(ranks).run(run_gradients, options)
    cut = 0
    for name, (shape, _, whole) in wanted.items():
        held = torch.zeros(shape)
        size = whole.abs().max().item()
        assert size > 1e-9, f"{name} gets no gradient, so this shows nothing"
        for parts in found:
            there, offset, part = parts[name]
            assert there == shape
            cut += part.numel() < whole.numel()
            where = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            held[where] += 1
            torch.testing.assert_close(part, whole[where], rtol=1e-10, atol=1e-11)
        assert (held > 0).all(), f"no rank holds some of {name}"
    assert cut > 10, "nothing is shared, so this shows nothing"


def batch_statistics(rank: int, group: Any) -> dict[str, Tensor]:
    """Summed gradients of unequal parts of a batch, and running statistics."""
    model = make(batch_group=group, pre_norm_act=True, stochastic_depth=0.3)
    ranks = 1 if group is ALONE else dist.get_world_size(group)
    part = slice(None) if ranks == 1 else (slice(0, 3), slice(3, BATCH))[rank]
    images, labels = (each[part] for each in images_of())
    model.set_dropout(len(labels), seed=9, step=3, first_row=part.start or 0)
    loss = model.loss(images, labels, reduction="sum") / BATCH
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if ranks > 1:
        for value in found.values():
            dist.all_reduce(value, group=group)
    return found | {name: b for name, b in model.named_buffers() if "running" in name}


def test_norms_of_a_batch_take_the_images_of_all_ranks(world):
    wanted = batch_statistics(0, ALONE)
    for found in world(2).run(batch_statistics):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert value.abs().max() > 1e-9, f"{name} is 0, so this shows nothing"
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-11)


PLANS = {
    "dp 2, zero 1": (2, ParallelPlan(zero=ZeroConfig(stage=1), num_microbatches=2)),
    "dp 2, zero 2": (2, ParallelPlan(zero=ZeroConfig(stage=2))),
    "dp 2, zero 3": (2, ParallelPlan(zero=ZeroConfig(stage=3))),
    "tp 2, recomputed": (2, ParallelPlan(tp=2, recompute=("blocks.*",))),
    "pp 2": (2, ParallelPlan(pp=2, pipeline=PipelineOptions(num_microbatches=4))),
    "pp 2, ghost norms": (2, ParallelPlan(pp=2, pipeline=PipelineOptions(num_microbatches=2))),
    "pp 4": (4, ParallelPlan(pp=4, pipeline=PipelineOptions("zb1p", num_microbatches=2))),
    "tp 2 x pp 2": (4, ParallelPlan(tp=2, pp=2)),
    "pp 2 x dp 2, zero 3": (4, ParallelPlan(pp=2, zero=ZeroConfig(stage=3))),
}
# What ZeRO does with any model, and tp x pp of one model after another: tests/zero, tests/parallel
IN_THE_SUITE = ("tp 2, recomputed", "pp 2")
GHOST = {"norm": "ghost", "ghost_size": 2}  # two micro-batches of two images


class SummedLoss:
    """What the head gives, nats of all rows. A `pyops.parallel.losses.CountedLoss`."""

    def count(self, batch: dict[str, Any]) -> float:
        return float(len(batch["labels_B"]))

    def divisor(self, batch: dict[str, Any]) -> float:
        return float((batch["labels_B"] >= 0).sum())

    def sum(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        return outputs

    def padded(self, batch: dict[str, Any], rows: int) -> dict[str, Any]:
        return padded_rows(batch, rows, targets="labels_B")


def trainer_of(plan: ParallelPlan, ranks: int, changes: dict[str, Any]) -> Trainer:
    mesh = Mesh(plan.axes(ranks))
    model = CoAtNet(config_of(**{**OPTIONS, **changes}), group=mesh, seed=None, device="meta")
    layered = LayeredModel(
        model,
        names=NAMES,
        costs=(1.0,) * 8,
        inputs="images_BCHW",
        initialize=lambda module: model.initialize(3, only=module),
    )
    return parallelize(
        layered,
        plan,
        optimizer=lambda params: AdamW(params, lr=0.02),
        mesh=mesh,
        loss=SummedLoss(),
        seed=5,
    )


def batch_of() -> dict[str, Any]:
    images, labels = images_of(dtype=torch.float32)
    return {"images_BCHW": images, "labels_B": labels, "reduction": "sum"}


@cache
def straight(ghost: bool) -> list[float]:
    """The losses of the model alone, with torch's own AdamW."""
    model = CoAtNet(config_of(**{**OPTIONS, **(GHOST if ghost else {})}), seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step in range(STEPS):
        model.set_dropout(BATCH, seed=5, step=step)
        nats = model(**batch_of())
        (nats / BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(nats.item() / BATCH)
    return losses


def run(
    rank: int, group: Any, plan: ParallelPlan, ranks: int, changes: dict[str, Any]
) -> list[float]:
    trainer = trainer_of(plan, ranks, changes)
    index, copies = trainer.mesh.rank("dp"), trainer.mesh.size("dp")
    ends = [0, 3, BATCH] if copies == 2 else [0, BATCH]  # uneven shares
    part = slice(ends[index], ends[index + 1])
    return [
        trainer.step(
            {
                key: value[part] if isinstance(value, Tensor) else value
                for key, value in batch_of().items()
            }
        )
        for _ in range(STEPS)
    ]


@pytest.mark.parametrize("name", [name if name in IN_THE_SUITE else full(name) for name in PLANS])
def test_losses_are_those_of_the_model_alone_under_every_plan(world, name):
    ranks, plan = PLANS[name]
    ghost = name.endswith("ghost norms")
    wanted = straight(ghost)
    assert wanted[-1] < wanted[0] - 0.05, f"it learns nothing, so this shows nothing: {wanted}"
    for losses in world(ranks).run(run, plan, ranks, GHOST if ghost else {}):
        assert losses == pytest.approx(wanted, abs=1e-5)


def refused(rank: int, group: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(group=group)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (3, r"stage 1 are 16 wide within, which 3 ranks do not divide; .* out of tp_stages"),
        (4, r"3 heads in 3 groups can't be split over 4 ranks"),
    ],
)
def test_channels_and_heads_that_ranks_cannot_share_are_refused(world, ranks, message):
    world(ranks).run(refused, message)


def test_a_norm_over_a_batch_is_refused_in_a_pipeline():
    model = make()
    with pytest.raises(ValueError, match=r"norm is 'batch', but a stage .* a ghost_size that div"):
        model.keep_layers([0, 1])
    assert len(model.blocks) == 6


def test_stages_are_evened_out_by_what_layers_were_measured_to_take():
    model = make(norm="layer", dtype=torch.float32)
    costs = measured_costs(model.layers(), images_of(dtype=torch.float32)[0], rounds=2)
    assert len(costs) == len(NAMES)
    assert min(costs) > 0
    boundaries = balance(costs, num_stages=2)
    assert boundaries[0] == 0
    assert boundaries[-1] == len(NAMES)
    assert next(model.parameters()).grad is None
