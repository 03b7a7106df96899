"""Training by a plan has the losses of plain transformers and torch.optim.AdamW on one process."""

from __future__ import annotations

from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pyops.optim import AdamW
from pyops.parallel import ParallelPlan, PipelineOptions, parallelize
from pyops.zero import ZeroConfig
from pyops.zero.layout.sharded import ShardedParameters
from tests.grids import cut, full
from tests.parallel.tiny_transformers import batch_for, make_model

pytestmark = pytest.mark.cpu_only

STEPS, ROWS, LR = 5, 8, 3e-3  # 20 steps under `-m full`
DROPOUT: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.2},
    "llama tied": {"attention_dropout": 0.2},
    "qwen3": {"attention_dropout": 0.2},
    "gpt2": {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.1},
    "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1},
    "t5": {"dropout_rate": 0.2},
    "vit": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1},
}
NO_DROPOUT = {name: dict.fromkeys(options, 0.0) for name, options in DROPOUT.items()}
PLANS = {
    "dp 2": (2, ParallelPlan()),
    "dp 2, zero 1": (2, ParallelPlan(zero=ZeroConfig(stage=1), num_microbatches=2)),
    # one copy has five rows, the other three
    "dp 2, zero 3": (2, ParallelPlan(zero=ZeroConfig(stage=3), num_microbatches=4)),
    "tp 2": (2, ParallelPlan(tp=2, num_microbatches=3)),
    "pp 2": (2, ParallelPlan(pp=2, pipeline=PipelineOptions(num_microbatches=4))),
    "pp 2, interleaved": (
        2,
        ParallelPlan(pp=2, pipeline=PipelineOptions("interleaved", stages_per_rank=2)),
    ),
    "pp 2, zbv": (2, ParallelPlan(pp=2, pipeline=PipelineOptions("zbv", recompute="always"))),
    "pp 2, zb1p": (2, ParallelPlan(pp=2, pipeline=PipelineOptions("zb1p"))),
    "tp 2 x pp 2": (4, ParallelPlan(tp=2, pp=2)),
    "tp 2, sequence parallel": (2, ParallelPlan(tp=2, sequence_parallel=True)),
    "tp 2 x pp 2, sequence parallel": (4, ParallelPlan(tp=2, pp=2, sequence_parallel=True)),
    "tp 2 x pp 2, sequence parallel, recompute": (
        4,
        ParallelPlan(
            tp=2,
            pp=2,
            sequence_parallel=True,
            recompute=("*.*.1", "*.*.2"),
            pipeline=PipelineOptions("zb1p", num_microbatches=3),
        ),
    ),
    "tp 2 x pp 2, sequence parallel, interleaved": (
        4,
        ParallelPlan(
            tp=2,
            pp=2,
            sequence_parallel=True,
            pipeline=PipelineOptions("interleaved", stages_per_rank=2),
        ),
    ),
    "dp 2, recompute": (2, ParallelPlan(recompute=("model.layers.*",), num_microbatches=2)),
    "pp 2, recompute": (2, ParallelPlan(pp=2, recompute=("model.layers.*",))),
    "pp 2 x dp 2, zero 2": (4, ParallelPlan(pp=2, zero=ZeroConfig(stage=2))),
    "pp 2 x dp 2, zero 1": (4, ParallelPlan(pp=2, zero=ZeroConfig(stage=1))),
    "pp 2 x dp 2, zero 3": (
        4,
        ParallelPlan(pp=2, pipeline=PipelineOptions("zb1p"), zero=ZeroConfig(stage=3)),
    ),
    "pp 2 x dp 2, zero 3, gathered once": (
        4,
        ParallelPlan(pp=2, pipeline=PipelineOptions(gather_once=True), zero=ZeroConfig(stage=3)),
    ),
    "tp 2 x dp 2, zero 1": (4, ParallelPlan(tp=2, zero=ZeroConfig(stage=1))),
}


def rows_for(name: str, step: int) -> dict[str, Tensor]:
    return batch_for(name, rows=ROWS, seed=100 + step)


def own_rows(batch: dict[str, Tensor], index: int, copies: int) -> dict[str, Tensor]:
    """Uneven shares: the first copy has more."""
    ends = [0, 5, ROWS] if copies == 2 else [0, ROWS]
    return {key: value[ends[index] : ends[index + 1]] for key, value in batch.items()}


@cache
def plain(name: str, steps: int = STEPS) -> list[float]:
    """The losses of transformers and torch.optim.AdamW, without dropout."""
    model = make_model(name, **NO_DROPOUT[name]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    shifts, losses = name not in ("bert", "t5", "vit"), []
    for step in [*range(steps), 0]:
        batch = rows_for(name, step)
        labels = batch.pop("labels")
        if name == "t5":
            batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
        logits = model(**batch).logits
        if shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - losses.pop()) > 1e-3, "nothing is learnt of the first batch"
    return losses


def train(name: str, plan: ParallelPlan, config: dict[str, Any], steps: int = STEPS) -> Any:
    model = make_model(name, **config)
    trainer = parallelize(model, plan, optimizer=partial(AdamW, lr=LR), seed=7)
    index, copies = trainer.mesh.rank("dp"), trainer.mesh.size("dp")
    return [trainer.step(own_rows(rows_for(name, step), index, copies)) for step in range(steps)]


def train_on_rank(rank: int, group: object, *args: Any) -> Any:
    return train(*args)


def first_steps(rank: int, group: object, *args: Any) -> Any:
    return train(*args, steps=4)


@cache
def alone(name: str, steps: int) -> list[float]:
    """The losses of one process, with dropout."""
    model = make_model(name, **DROPOUT[name])
    trainer = parallelize(model, optimizer=partial(AdamW, lr=LR), seed=7)
    before = trainer.evaluate([rows_for(name, 0)])
    losses = [trainer.step(rows_for(name, step)) for step in range(steps)]
    assert abs(trainer.evaluate([rows_for(name, 0)]) - before) > 1e-3, "nothing is learnt"
    return losses


def close(a: list[float], b: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", list(DROPOUT))
def test_one_process_has_the_losses_of_plain_torch(name):
    close(train(name, ParallelPlan(), NO_DROPOUT[name]), plain(name))


# Each axis with another; two copies at stage 3 are within a pipeline. Vision transformers and BERT
# stand in test_folders.py, on layouts of their own; every family on one process above.
IN_SUITE = [
    ("llama", "tp 2, sequence parallel"),
    ("llama tied", "pp 2 x dp 2, zero 2"),
    ("gpt2", "tp 2 x pp 2"),
    ("t5", "pp 2, zbv"),
    ("gpt2", "pp 2 x dp 2, zero 3, gathered once"),
]
CASES = cut(
    [
        *[("llama", plan) for plan in PLANS],
        *[(name, "tp 2 x pp 2") for name in DROPOUT if name != "llama"],
        *[(name, "pp 2, interleaved") for name in ("llama tied", "t5", "gpt2", "bert")],
        ("t5", "pp 2, zbv"),
        ("llama tied", "pp 2 x dp 2, zero 2"),
        ("gpt2", "dp 2, zero 3"),
        ("t5", "pp 2 x dp 2, zero 3"),
        ("bert", "pp 2 x dp 2, zero 3"),
        ("llama tied", "pp 2 x dp 2, zero 3"),
        ("gpt2", "pp 2 x dp 2, zero 3, gathered once"),
        ("bert", "pp 2 x dp 2, zero 1"),
        ("qwen3", "pp 2, recompute"),
        ("vit", "tp 2"),
        *[
            (name, plan)
            for name in ("gpt2", "bert", "t5", "vit")
            for plan in ("tp 2, sequence parallel", "tp 2 x pp 2, sequence parallel")
        ],
        ("gpt2", "tp 2 x pp 2, sequence parallel, recompute"),
        ("t5", "tp 2 x pp 2, sequence parallel, interleaved"),
    ],
    keep=IN_SUITE,
)


@pytest.mark.parametrize("steps", [STEPS, full(20)])
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_losses_do_not_depend_on_the_layout(name, plan, steps, world):
    ranks, chosen = PLANS[plan]
    found = world(ranks).run(train_on_rank, name, chosen, DROPOUT[name], steps)
    expected = alone(name, steps)
    for losses in found:
        close(losses, expected)
    assert max(abs(a - b) for a, b in zip(expected, plain(name, steps), strict=True)) > 1e-3, (
        "dropout drops nothing"
    )


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt2", "tp 2 x pp 2, sequence parallel, recompute"),
        full("t5", "tp 2 x pp 2, sequence parallel, interleaved"),
    ],
)
def test_stages_whose_ranks_share_tokens(name, plan, world):
    """The first steps of runs that the full grid takes to their end."""
    for losses in world(4).run(first_steps, name, PLANS[plan][1], DROPOUT[name]):
        close(losses, alone(name, STEPS)[:4])


def gathers_of_a_step(rank: int, group: object, once: bool) -> tuple[int, int]:
    """How often parts of the model were gathered in a step, and how many parts there are."""
    plan = ParallelPlan(pp=2, pipeline=PipelineOptions(gather_once=once), zero=ZeroConfig(stage=3))
    trainer = parallelize(make_model("llama"), plan, optimizer=partial(AdamW, lr=LR))
    gather, gathered = ShardedParameters.start_gather, []

    def noting(self: ShardedParameters, *args: Any, **options: Any) -> Any:
        gathered.append(self)
        return gather(self, *args, **options)

    with mock.patch.object(ShardedParameters, "start_gather", noting):
        trainer.step(rows_for("llama", 0))
    return len(gathered), len(set(gathered))


def test_parameters_are_gathered_once_a_step_where_it_is_said(world):
    assert all(times == parts for times, parts in world(4).run(gathers_of_a_step, True))
    assert all(times > 2 * parts for times, parts in world(4).run(gathers_of_a_step, False))
