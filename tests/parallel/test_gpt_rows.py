"""A GPT whose ranks share out the tokens of rows has the losses of one process, with every way of
attention, every order, and every other part of a plan."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.context_parallel import ContextRanks
from pyops.mesh import Mesh
from pyops.models import GPT, GPTConfig
from pyops.optim import AdamW
from pyops.parallel import LayeredModel, PairLoss, ParallelPlan, PipelineOptions, parallelize
from pyops.zero import ZeroConfig
from tests.grids import full
from tests.parallel.test_shared_tokens import METHODS, ORDERS, compiled_on_rank

pytestmark = pytest.mark.cpu_only

ROWS, T = 4, 16
# Adam divides gradients that are nothing but rounding, of the biases of keys, by themselves.
ADAM = {"lr": 0.01, "eps": 1e-5}
SIZES: dict[str, Any] = {"vocab_size": 12, "sequence_length": T, "num_layers": 2, "hidden": 16}
CONFIGS = {
    "learned": GPTConfig(**SIZES, num_heads=4, dim=16, dropout=0.2, attention_dropout=0.1),
    "rotary": GPTConfig(
        **SIZES, num_heads=4, dim=16, dropout=0.2, attention_dropout=0.1, positions="rotary"
    ),
    "grouped": GPTConfig(
        **SIZES, num_heads=4, num_kv_heads=2, dim=16, dropout=0.1, attention_dropout=0.2,
        positions="rotary",
    ),
}  # fmt: skip
LOSS = PairLoss(
    lambda nats, batch: nats,
    lambda batch: float(batch["targets_BT"].numel()),
    names=("targets_BT", "reduction"),
)
STAGES = PipelineOptions(num_microbatches=2)
ZERO_3 = ZeroConfig(stage=3)
MORE: list[tuple[int, str, dict[str, Any]]] = [
    (2, "ring", {"recompute": ("blocks.*",)}),
    (4, "ring", {"tp": 2}),
    (4, "ulysses", {"tp": 2, "sequence_parallel": True}),
    (4, "ring", {"pp": 2, "pipeline": STAGES}),
    (4, "gather", {"zero": ZERO_3}),
    (4, "ring", {"zero": ZeroConfig(stage=2)}),
    (8, "ring", {"pp": 2, "pipeline": STAGES, "tp": 2, "sequence_parallel": True}),
    (8, "ulysses", {"tp": 2, "zero": ZERO_3}),
]


def rows_for(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    first, stride = torch.randint(1, 4, (2, ROWS, 1), generator=generator)
    text = (first + stride * torch.arange(T + 1)) % 12
    return {"tokens_BT": text[:, :-1], "targets_BT": text[:, 1:], "reduction": "sum"}


@cache
def straight(name: str, steps: int) -> list[float]:
    """The losses of GPT alone, with torch's own AdamW."""
    model = GPT(CONFIGS[name], seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for step in [*range(steps), 0]:
        batch = rows_for(step)
        model.set_dropout((ROWS, T), seed=5, step=step)
        loss: Tensor = model(**batch) / (ROWS * T)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] - losses.pop() > 0.05, "nothing is learnt"
    return losses


def _run(rank: int, group: object, name: str, plan: ParallelPlan, way: Any, steps: int) -> Any:
    method, order = way
    mesh = Mesh(plan.axes(torch.distributed.get_world_size()))
    model = GPT(
        CONFIGS[name],
        group=mesh,
        sequence_parallel=plan.sequence_parallel,
        context=ContextRanks.of(mesh, method=method),
        order=order,
        seed=None,
        device="meta",
    )
    trainer = parallelize(
        LayeredModel(
            model,
            names=("embedding", "blocks.0", "blocks.1", "head"),
            costs=(0.0, 3.0, 3.0, 1.0),
            inputs="tokens_BT",
            initialize=lambda module: model.initialize(3, only=module),
        ),
        plan,
        optimizer=partial(AdamW, **ADAM),
        mesh=mesh,
        loss=LOSS,
        seed=5,
    )
    index, copies = mesh.rank("dp"), mesh.size("dp")
    own = slice(index * ROWS // copies, (index + 1) * ROWS // copies)
    losses = []
    for step in range(steps):
        batch = {
            key: value[own] if isinstance(value, Tensor) else value
            for key, value in rows_for(step).items()
        }
        losses.append(trainer.step(batch))
    return losses


@pytest.mark.parametrize(
    ("name", "ranks", "way", "plan", "steps"),
    [
        ("grouped", 2, ("ulysses", "striped"), {"cp": 2}, 5),
        *[
            full(name, cp, (method, order), {"cp": cp}, 20)
            for name in CONFIGS
            for cp in (2, 4)
            for method in METHODS
            for order in ORDERS
        ],
        *[
            full(name, ranks, (method, "zigzag"), {"cp": 2, **more}, 20)
            for name in ("learned", "grouped")
            for ranks, method, more in MORE
        ],
    ],
)
def test_losses_do_not_depend_on_who_has_which_tokens(
    name: str, ranks: int, way: tuple[str, str], plan: dict[str, Any], steps: int, world: Any
) -> None:
    expected = straight(name, steps)
    for losses in world(ranks).run(_run, name, ParallelPlan(**plan), way, steps):
        assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", [full("learned"), full("grouped")])
def test_blocks_are_compiled_around_the_exchange(name: str, world: Any) -> None:
    plan, way = ParallelPlan(cp=2, compile=True), ("ring", "zigzag")
    for losses, frames in world(2).run(compiled_on_rank, "aot_eager", _run, name, plan, way, 3):
        assert losses == pytest.approx(straight(name, 5)[:3], abs=1e-5)
        assert frames > 2


def _refused(rank: int, group: object) -> str:
    mesh = Mesh(ParallelPlan(cp=2).axes(2))
    model = GPT(CONFIGS["rotary"], context=ContextRanks.of(mesh), seed=3)
    layered = LayeredModel(
        model, names=("e", "b.0", "b.1", "h"), costs=(0.0, 1.0, 1.0, 1.0), inputs="tokens_BT"
    )
    with pytest.raises(
        ValueError, match=r"cp_method is 'ring', but GPT was made with its own"
    ) as e:
        parallelize(
            layered, ParallelPlan(cp=2, cp_method="ring"), optimizer=AdamW, mesh=mesh, loss=LOSS
        )
    return str(e.value)


def test_a_plan_says_nothing_of_what_the_model_was_made_with(world: Any) -> None:
    first, second = world(2).run(_refused)
    assert first == second
