"""A step of the same stages: of Pipeline, of torch.distributed.pipelining, and without messages."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from pyops.pipeline import Pipeline, PipelineConfig, Schedule

__all__ = ["Ours", "StagesAlone", "Theirs"]

THEIRS = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}


class Ours:
    """A step of Pipeline, with the optimizer's where `steps`; its loss."""

    def __init__(
        self,
        layers: list[nn.Module],
        made: Schedule,
        loss: Callable[..., Tensor],
        x: Tensor,
        target: Tensor,
        *,
        steps: bool,
    ) -> None:
        self.pipeline = Pipeline(
            layers,
            schedule=made,
            group=dist.group.WORLD,
            loss=loss,
            config=PipelineConfig(boundaries=[0, *cuts(len(layers), made.num_stages), len(layers)]),
        )
        self.x, self.target = x, target
        self.optimizer = (
            torch.optim.AdamW(self.pipeline.parameters(), lr=1e-4, fused=True) if steps else None
        )

    def __call__(self) -> float:
        loss = self.pipeline.step(self.x, self.target)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss)


class Theirs:
    """The same step of torch.distributed.pipelining."""

    def __init__(
        self,
        layers: list[nn.Module],
        name: str,
        microbatches: int,
        loss: Callable[..., Tensor],
        x: Tensor,
        target: Tensor,
        *,
        steps: bool,
    ) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        edges = [0, *cuts(len(layers), size), len(layers)]
        self.module = nn.Sequential(*layers[edges[rank] : edges[rank + 1]])
        stage = pipelining.PipelineStage(self.module, rank, size, torch.device("cpu"))
        self.schedule = THEIRS[name](stage, n_microbatches=microbatches, loss_fn=loss)
        self.x, self.target = x, target
        self.optimizer = (
            torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True) if steps else None
        )

    def __call__(self) -> float:
        losses: list[Tensor] = []
        if dist.get_rank() == 0:
            self.schedule.step(self.x)
        else:
            self.schedule.step(target=self.target, losses=losses)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else 0.0


class StagesAlone:
    """What the ranks' stages take for all micro-batches, one after the other, when nothing is
    sent."""

    def __init__(
        self, layers: list[nn.Module], microbatches: int, x: Tensor, target: Tensor
    ) -> None:
        edges = [0, *cuts(len(layers), dist.get_world_size()), len(layers)]
        self.module = nn.Sequential(*layers[edges[dist.get_rank()] : edges[dist.get_rank() + 1]])
        self.xs, self.targets = x.tensor_split(microbatches), target.tensor_split(microbatches)

    def __call__(self) -> None:
        for x, target in zip(self.xs, self.targets, strict=True):
            y = self.module(x.detach().requires_grad_())
            (nn.functional.mse_loss(y, target) / len(self.xs)).backward()


def cuts(layers: int, stages: int) -> list[int]:
    """Where the second stage and those after it begin: equal numbers of layers."""
    return [layers * stage // stages for stage in range(1, stages)]
