"""Evaluation has the loss of one process and changes nothing; shares may be uneven."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.optim import AdamW
from pyops.parallel import PairLoss, ParallelPlan, PipelineOptions, Trainer, parallelize
from pyops.parallel.losses import LabelLoss
from pyops.zero import ZeroConfig
from tests.grids import full
from tests.parallel.tiny_transformers import batch_for, make_model

pytestmark = pytest.mark.cpu_only

DROPOUT = {"resid_pdrop": 0.3}
PLANS = {
    "tp": ParallelPlan(tp=2),
    "pp": ParallelPlan(pp=2, pipeline=PipelineOptions("interleaved", stages_per_rank=2)),
    "zero 3": ParallelPlan(zero=ZeroConfig(stage=3)),
}


def evaluated(rank: int, group: object, plan: ParallelPlan, sizes: dict[int, list[int]]) -> Any:
    """The loss before a step and after evaluation; sizes: of the batches of each copy."""
    model = make_model("gpt2", **DROPOUT)
    trainer = parallelize(model, plan, optimizer=partial(AdamW, lr=1e-2), seed=3)
    index = trainer.mesh.rank("dp")
    every = batch_for("gpt2", rows=11, seed=5)
    first = sum(map(sum, (sizes[i] for i in range(index))))
    batches = []
    for size in sizes[index]:
        batches.append({key: value[first : first + size] for key, value in every.items()})
        first += size
    random = torch.get_rng_state()
    trainer.model.train()
    found = trainer.evaluate(batches)
    assert trainer.model.training
    assert torch.equal(torch.get_rng_state(), random)
    rows = batch_for("gpt2", rows=8, seed=6)
    step = trainer.step(
        {k: v[4 * index : 4 * index + 4] for k, v in rows.items()}
        if trainer.mesh.size("dp") == 2
        else rows
    )
    return found, step, trainer.evaluate(iter(batches))


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        full("tp", {0: [4, 4, 3]}),
        full("pp", {0: [4, 4, 3]}),
        ("pp", {0: [9, 1, 1]}),
        full("zero 3", {0: [4, 3], 1: [4]}),
        ("zero 3", {0: [2], 1: [2, 2, 2, 2, 1]}),
    ],
)
def test_evaluation_has_the_loss_of_one_process(plan, sizes, world):
    expected = evaluated(0, None, ParallelPlan(), {0: [11]})
    for found in world(2).run(evaluated, PLANS[plan], sizes):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-5)
    assert abs(expected[0] - expected[2]) > 5e-5, "the step did nothing"


def uneven(rank: int, group: object, plan: ParallelPlan, split: int) -> list[float]:
    model = make_model("llama")
    trainer = parallelize(model, plan, optimizer=partial(AdamW, lr=1e-2))
    losses = []
    for step in range(4):
        batch = batch_for("llama", rows=7, seed=step)
        rows = slice(0, split) if trainer.mesh.rank("dp") == 0 else slice(split, 7)
        if trainer.mesh.size("dp") == 1:
            rows = slice(0, 7)
        losses.append(trainer.step({key: value[rows] for key, value in batch.items()}))
    assert_learns(trainer, losses[0])
    return losses


def assert_learns(trainer: Trainer, first: float) -> None:
    """The loss of the first step's rows is another by now: something was stepped."""
    again = trainer.evaluate([batch_for("llama", rows=7, seed=0)])
    assert abs(again - first) > 1e-3


@pytest.mark.parametrize(
    ("plan", "split"), [full("dp", 7), full("dp", 1), ("zero 3", 0), ("pp", 7), full("pp many", 7)]
)
def test_uneven_shares_change_nothing(plan, split, world):
    plans = {
        **PLANS,
        "dp": ParallelPlan(num_microbatches=3),
        "pp many": ParallelPlan(pp=2, pipeline=PipelineOptions("gpipe", num_microbatches=10)),
    }
    expected = uneven(0, None, ParallelPlan(), 7)
    for losses in world(2).run(uneven, plans[plan], split):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-5)


def test_a_loss_that_is_divided_for_each_part_is_another(monkeypatch):
    """What the tests above would not see if all rows had as many labels."""
    expected = uneven(0, None, ParallelPlan(), 7)
    inner = LabelLoss.sum

    def mean(self: LabelLoss, outputs: Any, batch: Any) -> Tensor:
        return inner(self, outputs, batch) / self.count(batch) * 40

    monkeypatch.setattr(LabelLoss, "sum", mean)
    assert uneven(0, None, ParallelPlan(num_microbatches=3), 7) != pytest.approx(expected, abs=1e-3)


def test_padding_changes_nothing():
    batch = batch_for("llama", rows=4)
    longer = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, 3), value=5),
        "labels": torch.nn.functional.pad(batch["labels"], (0, 3), value=-100),
    }
    losses = []
    for rows in (batch, longer):
        trainer = parallelize(make_model("llama"), optimizer=partial(AdamW, lr=1e-2))
        losses.append([trainer.step(rows) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0][0] - losses[0][2] > 1e-3


def pair(outputs: Any, batch: Any) -> Tensor:
    return (outputs["logits"].float() - 1).square().mean(dim=(1, 2)).sum()


def count(batch: Any) -> float:
    return float(len(batch["input_ids"]))


def of_pair(rank: int, group: object, plan: ParallelPlan) -> list[float]:
    trainer = parallelize(
        make_model("llama"), plan, optimizer=partial(AdamW, lr=1e-2), loss=(pair, count)
    )
    ids = batch_for("llama", rows=8)["input_ids"]
    own = ids[trainer.mesh.rank("dp") :: trainer.mesh.size("dp")]
    return [trainer.step({"input_ids": own}) for _ in range(3)]


@pytest.mark.parametrize("plan", [ParallelPlan(), ParallelPlan(pp=2)], ids=["dp", "pp"])
def test_a_loss_of_your_own(plan, world):
    expected = of_pair(0, None, ParallelPlan())
    assert expected[0] - expected[2] > 1e-3
    for losses in world(2).run(of_pair, plan):
        assert losses == pytest.approx(expected, abs=1e-5)


def weighted(outputs: Any, batch: Any) -> Tensor:
    errors = (outputs["logits"].float() - 1).square().mean(dim=(1, 2))
    return (errors * batch["weights"]).sum()


def of_weights(rank: int, group: object, plan: ParallelPlan) -> list[float]:
    loss = PairLoss(weighted, lambda batch: float(batch["weights"].sum()), names=("weights",))
    trainer = parallelize(make_model("llama"), plan, optimizer=partial(AdamW, lr=1e-2), loss=loss)
    ids, weights = batch_for("llama", rows=8)["input_ids"], torch.arange(8.0)
    own = slice(trainer.mesh.rank("dp"), None, trainer.mesh.size("dp"))
    batch = {"input_ids": ids[own], "weights": weights[own]}
    return [*(trainer.step(batch) for _ in range(3)), trainer.evaluate([batch])]


@pytest.mark.parametrize("plan", [ParallelPlan(num_microbatches=2), ParallelPlan(pp=2)])
def test_what_the_loss_alone_takes_goes_to_it_alone(plan, world):
    expected = of_weights(0, None, ParallelPlan())
    assert expected[0] - expected[3] > 1e-3
    for losses in world(2).run(of_weights, plan):
        assert losses == pytest.approx(expected, abs=1e-5)
    with pytest.raises(TypeError, match=r"give a tuple of names, \('weights',\)"):
        PairLoss(weighted, len, names="weights")


REFUSED = {
    "no mapping": ([1], ("list", "mapping")),
    "unknown": (
        {"input_ids": torch.ones(2, 3, dtype=torch.long), "tokens": 3},
        ("has 'tokens'", "nor the loss", "PairLoss(sum, count, names=('tokens',))"),
    ),
    "rows": (
        {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.ones(3, 3).long()},
        ("2, 3", "rows"),
    ),
    "no labels": ({"input_ids": torch.ones(2, 3, dtype=torch.long)}, ("labels", "input_ids")),
    "nothing counts": (
        {
            "input_ids": torch.ones(2, 3, dtype=torch.long),
            "labels": torch.full((2, 3), -100),
        },
        ("-100",),
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_batch_that_can_not_be_used_is_refused(name):
    batch, words = REFUSED[name]
    trainer = parallelize(make_model("llama"), optimizer=partial(AdamW, lr=1e-2))
    before = [p.clone() for p in trainer.model.parameters()]
    with pytest.raises((ValueError, TypeError)) as caught:
        trainer.step(batch)
    assert all(word in str(caught.value) for word in words), caught.value
    assert all(map(torch.equal, trainer.model.parameters(), before))
    assert trainer.step(batch_for("llama", rows=2)) > 0


def one_refuses(rank: int, group: object) -> str:
    trainer = parallelize(make_model("llama"), optimizer=partial(AdamW, lr=1e-2))
    batch = batch_for("llama", rows=2)
    if rank == 1:
        del batch["labels"]
    with pytest.raises(ValueError, match="labels") as caught:
        trainer.step(batch)
    assert trainer.step(batch_for("llama", rows=2)) > 0
    return str(caught.value)


def test_a_bad_batch_of_one_rank_is_refused_on_all(world):
    first, second = world(2).run(one_refuses)
    assert "rank 1" in first
    assert "labels" in second
