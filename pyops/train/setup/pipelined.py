"""A model whose layers lie on the ranks of a pipeline: its steps, its losses and its samples, as if
it were in one place.

    rank 0   embedding, block 0, block 1   0F0 0F1 0F2 0B0 0F3 0B1 ...  0B3 | reduce |
    rank 1   block 2, block 3, head        1F0 1B0 1F1 1B1 ...   1B3 | reduce | norm, step

    reduce: the gradients of the stage are reduced over its data-parallel ranks

Layers of other ranks never have memory; those that are here keep the names of the whole model, so
checkpoints, first values and dropout are those of one process.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import naming_lost_ranks
from pyops.config import Config
from pyops.mesh import Mesh
from pyops.models import GPT, GPTConfig
from pyops.models.vocabulary_head import IGNORED
from pyops.pipeline import Action, Pipeline, PipelineConfig, Schedule, balance, custom
from pyops.pipeline.runtime.stage import Stage
from pyops.tensor_parallel import set_dropout
from pyops.zero import ZeroOptimizer

__all__ = ["LocalStages", "PipelinedModel", "layer_costs"]


class LocalStages:
    """What this rank has of `model`, which is on the meta device: the other layers are taken out of
    it.

    Args:
        plan: The pipeline's. boundaries: first layers of its stages, evened out by products; names:
            of all the model's layers.
    """

    def __init__(self, model: GPT, *, plan: Schedule, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.layers = model.layers()
        self.names = ["embedding", *(f"blocks.{i}" for i in range(model.config.num_layers)), "head"]
        self.boundaries = balance(layer_costs(model.config), num_stages=plan.num_stages)
        self.own = [
            n
            for stage in plan.stages_of(rank)
            for n in range(self.boundaries[stage], self.boundaries[stage + 1])
        ]
        model.keep_layers(self.own)


def layer_costs(config: GPTConfig) -> list[float]:
    """Of each layer, in products of a token: looking up an embedding takes none."""
    kv = 2 * config.kv_heads * config.head_width
    attention = (
        config.dim * (2 * config.num_heads * config.head_width + kv)
        + config.sequence_length * config.dim
    )
    mlp = (3 if config.activation == "swiglu" else 2) * config.dim * config.mlp_width
    return [
        0.0,
        *[float(attention + mlp)] * config.num_layers,
        float(config.vocab_size * config.dim),
    ]


class PipelinedModel:
    """Runs the stages of `model` that are on this rank, with the other ranks of the axis "pp"."""

    def __init__(
        self,
        config: Config,
        model: GPT,
        stages: LocalStages,
        zero: ZeroOptimizer,
        *,
        mesh: Mesh,
        num_rows: int,
    ) -> None:
        """Make the pipeline.

        Args:
            config: The run's configuration.
            model: The model, of which this rank has the layers of `stages`.
            stages: This rank's stages.
            zero: The optimizer of this rank's parameters.
            mesh: The ranks.
            num_rows: Sequences of this model's batch, on all its ranks alike.
        """
        self.config, self.model, self.zero, self.num_rows = config, model, zero, num_rows
        self.local = stages
        self.group = mesh.group("pp")
        self.pipeline = self._pipeline(stages.plan)
        self.pipeline.on_action(self._done)
        # Of each stage, the place in this rank's order after which its gradients are complete.
        last, order = stages.plan.last_gradients, stages.plan.ranks[stages.rank]
        self._ends = {order[last[stage]]: stage for stage in stages.plan.stages_of(stages.rank)}
        self._keys: dict[str, int] = {}

    def _pipeline(self, plan: Schedule) -> Pipeline:
        # The head gives the loss itself, in which whole logits never are; the optimizer sums what
        # is tied.
        return Pipeline(
            self.local.layers,
            schedule=plan,
            group=self.group,
            loss=lambda nats, _: nats,
            config=PipelineConfig(
                reduction="sum",
                boundaries=self.local.boundaries,
                before_forward=self._before,
                tied=None,
            ),
        )

    @property
    def described(self) -> str:
        """The layout, in words."""
        ends = zip(self.local.boundaries, self.local.boundaries[1:], strict=False)
        names = self.local.names
        stages = " | ".join(
            names[a] if b - a == 1 else f"{names[a]} .. {names[b - 1]}" for a, b in ends
        )
        return (
            f"pipeline {self.local.plan.name}, {self.local.plan.num_microbatches} "
            f"micro-batches: {stages}"
        )

    def differentiate(self, rows_BT: Tensor, *, scale: float, step: int, first_row: int) -> Tensor:
        """Forward and backward of all `rows`: their nats, on every rank. Gradients are multiplied
        by `scale`; each stage's are on their way to the other models when this returns.

        Args:
            step, first_row: What keys dropout.
        """
        self._keys = {"step": step, "first_row": first_row}
        with self._gathered(), self.zero.no_sync():
            return self.pipeline.step(scale=scale, **self._given(rows_BT))

    def _gathered(self) -> AbstractContextManager[None]:
        """At stage 3 the parameters are gathered once for all micro-batches."""
        return self.zero.whole_parameters() if self.zero.stage == 3 else nullcontext()

    @torch.no_grad()
    def evaluate(self, rows_BT: Tensor) -> Tensor:
        """Nats of any number of sequences, on every rank."""
        self._keys = {}
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        with self._gathered():
            for some_BT in rows_BT.split(self.num_rows):
                lacking = self.num_rows - len(some_BT)
                if len(some_BT):
                    total += self.pipeline(**self._given(some_BT, lacking=lacking))
        return total

    def _given(self, rows_BT: Tensor, *, lacking: int = 0) -> dict[str, Any]:
        """Arguments of the pipeline for rows [B, T + 1]. lacking: rows to add, whose targets don't
        count."""
        tokens_BT, targets_BT = rows_BT[:, :-1], rows_BT[:, 1:]
        if lacking:
            tokens_BT = torch.cat([tokens_BT, tokens_BT[:1].expand(lacking, -1)])
            targets_BT = torch.cat(
                [targets_BT, targets_BT.new_full((lacking, targets_BT.shape[1]), IGNORED)]
            )
        shape = (self.num_rows // self.local.plan.num_microbatches, tokens_BT.shape[1])
        return {
            "batch": tokens_BT,
            "target": targets_BT,
            "targets_BT": targets_BT,
            "shape": shape,
            "reduction": "sum",
        }

    def _before(self, stage: Stage, number: int) -> None:
        """Key the dropout of a stage's layers by their names in the whole model."""
        model = self.config.model
        if not self._keys or not (model.dropout or model.attention_dropout):
            return
        size = self.num_rows // self.local.plan.num_microbatches
        for layer, name in zip(stage.layers, self.local.names[stage.first :], strict=False):
            set_dropout(
                layer,
                seed=self.config.train.seed,
                step=self._keys["step"],
                shape=(size, model.sequence_length),
                first_row=self._keys["first_row"] + number * size,
                prefix=f"{name}.",
            )

    def _done(self, action: Action) -> None:
        """After each action: a stage whose gradients are complete has them reduced over the
        models."""
        if (stage := self._ends.get(action)) is not None:
            self.zero.reduce(
                p for layer in self.pipeline.stages[stage].layers for p in layer.parameters()
            )

    def whole(self) -> nn.Module:
        """The model as it is, for `sample`: tokens [1, T] -> logits [1, 1, V] of the last one, on
        every rank. All call it."""
        plan = self.local.plan
        orders = []
        for rank in range(plan.num_ranks):
            stages = plan.stages_of(rank)
            orders.append(
                [
                    *(Action(s, "F", 0) for s in stages),
                    *(Action(s, "B", 0) for s in reversed(stages)),
                ]
            )
        return _Whole(self.model, self._pipeline(custom(orders, rank_of=plan.rank_of)))


class _Whole(nn.Module):
    def __init__(self, model: GPT, pipeline: Pipeline) -> None:
        super().__init__()
        self.model, self.pipeline = model, pipeline

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV = self.pipeline(tokens_BT, shape=tuple(tokens_BT.shape))
        like = next(self.model.parameters())
        if logits_BTV is None:
            last_BTV = like.new_empty(len(tokens_BT), 1, self.model.config.vocab_size)
        else:
            last_BTV = logits_BTV[:, -1:].contiguous()
        with naming_lost_ranks("the broadcast of logits", group=self.pipeline.group):
            dist.broadcast(
                last_BTV, group=self.pipeline.group, group_src=self.pipeline.schedule.rank_of[-1]
            )
        return last_BTV
