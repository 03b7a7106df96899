"""What a stage keeps while a pipeline runs is what the simulator says, from a profile of its
layers."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.mesh import ALONE
from pyops.pipeline import Action, Pipeline, profile, schedule, simulate
from tests.grids import cut

pytestmark = pytest.mark.cpu_only

ROWS, WIDTH = 4, 16
SYNCHRONOUS = ("gpipe", "1f1b", "interleaved", "zb1p", "interleaved_zb", "zbv")


def layers(several: int) -> list[nn.Module]:
    torch.manual_seed(0)
    inner = 3 * WIDTH
    # Tanh keeps its output, not its input, which the stage keeps: its gradient arrives there.
    return [
        nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH))
        for _ in range(several)
    ]


class Saved:
    """What autograd saved of one tensor: there as long as its graph is."""

    def __init__(self, tensor: Tensor, stage: int) -> None:
        self.tensor, self.stage = tensor, stage


class Watch:
    """The most bytes that each rank's stages have kept after any action: their graphs, their
    inputs, what they put off."""

    def __init__(self, pipeline: Pipeline, owned: set[int]) -> None:
        self.pipeline, self.owned = pipeline, owned
        self.alive: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.most = [0] * pipeline.schedule.num_ranks
        self.now = 0
        for index, stage in pipeline.stages.items():
            self.follow(index, stage)
        pipeline._train.on_action = self.look

    def follow(self, index: int, stage: Any) -> None:
        call = stage.call

        def called(*args: Any) -> Any:
            self.now = index
            return call(*args)

        stage.call = called

    def pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor, self.now)
        self.alive.add(saved)
        return saved

    def look(self, action: Action) -> None:
        made = self.pipeline.schedule
        rank = made.rank_of[action.stage]
        stages = {index: self.pipeline.stages[index] for index in made.stages_of(rank)}
        kept = [each.tensor for each in self.alive if each.stage in stages]
        kept += [
            leaf
            for stage in stages.values()
            for graph in stage._graphs.values()
            for leaf in graph.leaves
        ]
        kept += [
            again.x
            for index, stage in stages.items()
            if index
            for again in stage._recompute_inputs.values()
        ]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        found = sum(size for address, size in storages.items() if address not in self.owned)
        found += sum(
            pieces.nbytes
            for stage in stages.values()
            for pieces in stage._deferred_weight_grads.values()
        )
        self.most[rank] = max(self.most[rank], found)


# Every schedule as it is; each way to recompute where backward is one action and where it is two.
KEPT = [
    *((name, "never") for name in SYNCHRONOUS),
    *((name, way) for name in ("1f1b", "zbv") for way in ("always", "except_last")),
]


@pytest.mark.parametrize(
    ("name", "recompute"),
    cut(itertools.product(SYNCHRONOUS, ("never", "always", "except_last")), keep=KEPT),
)
def test_what_stages_keep_is_what_was_simulated(name: str, recompute: str):
    k, m = 3, 6
    made = schedule(name, num_stages=k, num_microbatches=m).with_recompute(recompute)
    model = layers(2 * made.num_stages)
    x, target = torch.randn(m * ROWS, WIDTH), torch.randn(m * ROWS, WIDTH)
    found = profile(
        model, x[:ROWS], loss=nn.functional.mse_loss, target=target[:ROWS], rounds=1, warmup=0
    )
    pipeline = Pipeline(model, schedule=made, group=ALONE, loss=nn.functional.mse_loss)
    costs = found.costs(pipeline.boundaries, split=made.splits_backward, optimizer_bytes=0)
    owned = {t.untyped_storage().data_ptr() for t in (x, target, *pipeline.parameters())}
    watch = Watch(pipeline, owned)
    with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda saved: saved.tensor):
        pipeline.step(x, target)
    for rank in range(k):
        stages = made.stages_of(rank)
        expected = simulate(made, costs).memory[rank] - sum(
            costs.of("weights", stage) for stage in stages
        )
        assert watch.most[rank] > 0
        if any(after in stages for after in (stage + 1 for stage in stages)):
            # Neighbours on one rank share what travels between them, which the simulator counts
            # twice.
            assert (
                0 <= expected - watch.most[rank] <= max(costs.of("kept", stage) for stage in stages)
            )
        else:
            assert watch.most[rank] == expected, rank
