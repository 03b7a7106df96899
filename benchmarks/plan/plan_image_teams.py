"""Layouts of one CoAtNet on the ranks of a `rank_teams.Team`, as `benchmarks.plan.plan_teams` has
those of a GPT.

    python -m benchmarks.plan.plan_image_teams plan SIZE        a rank; SIZE of `IMAGE_SIZES`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.instruments.rank_teams import serve
from benchmarks.plan.plan_teams import DEGREES, PRECISION, Ranks, join
from pyops.mesh import Mesh
from pyops.models import CoAtNet, CoAtNetConfig
from pyops.optim import AdamW
from pyops.parallel import LayeredModel, parallelize
from pyops.plan import (
    PYOPS,
    Cluster,
    ImageCase,
    ImageShape,
    Layout,
    MeasuredLayers,
    load_cluster,
    measure_layers,
)
from pyops.plan.costs.images import stage_bounds
from pyops.plan.settings import parallel_plan

__all__ = ["IMAGE_LAYOUTS", "IMAGE_SIZES", "ImageSize", "ImageTrial", "case_of"]


@dataclass(frozen=True)
class ImageSize:
    """A CoAtNet and the images of a step."""

    model: CoAtNetConfig
    batch: int
    ranks: tuple[int, ...] = (1, 2, 4)
    """With how many ranks it is run."""

    @property
    def shape(self) -> ImageShape:
        """The model as numbers."""
        return ImageShape(self.model, "CoAtNet")


IMAGE_SIZES = {
    # CoAtNet-0's blocks, half as wide, for images of 64 pixels.
    "half": ImageSize(
        CoAtNetConfig(
            num_labels=10,
            image_size=64,
            stem_width=32,
            widths=(48, 96, 192, 384),
            norm="layer",
        ),
        batch=16,
    ),
    "tiny": ImageSize(
        CoAtNetConfig(
            num_labels=10,
            image_size=32,
            stem_width=16,
            depths=(1, 1, 2, 1),
            widths=(16, 32, 64, 96),
            head_dim=16,
            norm="layer",
        ),
        batch=8,
        ranks=(1,),
    ),
}

# By ranks; images of a step are those of the size "half".
IMAGE_LAYOUTS: dict[int, tuple[Layout, ...]] = {
    1: (
        Layout(micro_batch=16),
        Layout(micro_batch=4, num_microbatches=4),
        Layout(micro_batch=8, num_microbatches=2, recompute="block"),
    ),
    2: (
        Layout(dp=2, micro_batch=8),
        Layout(dp=2, zero=1, micro_batch=4, num_microbatches=2),
        Layout(dp=2, zero=3, micro_batch=8),
        Layout(tp=2, micro_batch=16),
        Layout(pp=2, schedule="1f1b", micro_batch=4, num_microbatches=4),
    ),
    4: (
        Layout(dp=4, micro_batch=4),
        Layout(tp=2, dp=2, micro_batch=8),
        Layout(pp=2, dp=2, zero=1, schedule="1f1b", micro_batch=2, num_microbatches=4),
    ),
}


def _nats(outputs: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """What the head gives: of all images."""
    return outputs


def _number(batch: Mapping[str, Any]) -> float:
    return float(len(batch["labels_B"]))


class ImageTrial:
    """Some steps of a CoAtNet on made-up images. Making it is a collective, like every step.

    Args:
        size: The model and the batch.
        layout: How ranks share it.
        cuts: The first layer of each stage of the pipeline, and the number of layers.

    Attributes:
        batch_bytes: Of a step's images and labels.
    """

    def __init__(self, size: ImageSize, layout: Layout, cuts: tuple[int, ...]) -> None:
        plan = parallel_plan(layout, precision=PRECISION)
        if layout.pp > 1:
            plan = replace(plan, pipeline=replace(plan.pipeline, boundaries=cuts))
        mesh = Mesh(plan.axes(layout.num_ranks))
        model = CoAtNet(size.model, group=mesh, seed=None, device="meta")
        names = tuple(layer.name for layer in size.shape.layers)
        layered = LayeredModel(
            model,
            names=names,
            costs=(1.0,) * len(names),
            inputs="images_BCHW",
            initialize=lambda module: model.initialize(0, only=module),
        )
        self._trainer = parallelize(
            layered,
            plan,
            optimizer=lambda parameters: AdamW(parameters, lr=1e-3),
            mesh=mesh,
            loss=(_nats, _number),
        )
        rows = size.batch // layout.dp
        generator = torch.Generator().manual_seed(mesh.rank("dp"))
        sides = (size.model.num_channels, *size.model.sides)
        images = torch.randn(rows, *sides, generator=generator)
        labels = torch.arange(rows) % size.model.num_labels
        self.batch_bytes = images.nbytes + labels.nbytes
        self._batch = {"images_BCHW": images, "labels_B": labels, "reduction": "sum"}

    def step(self) -> float:
        """Take one step; the seconds that it took on this rank."""
        start = time.perf_counter()
        self._trainer.step(self._batch)
        return time.perf_counter() - start


def case_of(size: ImageSize, cluster: Cluster, measured: MeasuredLayers) -> ImageCase:
    """What is priced, without what an allocator takes."""
    software = replace(PYOPS, fragmentation=1.0)
    return ImageCase(size.shape, cluster, software, PRECISION, measured)


def make(size: ImageSize) -> dict[str, Callable[[], Any]]:
    """The functions of one rank; it measures the machine before it makes trials, whose pipelines
    are cut by what layers were measured to take."""
    join()
    found: list[ImageCase] = []

    def costs(number: int) -> MeasuredLayers:
        measured = measure_layers(size.shape, precision=PRECISION, tp=DEGREES[number])
        # Of whole layers the device's figures say nothing.
        found.append(case_of(size, load_cluster("laptop"), measured))
        return measured

    def trial(layout: Layout) -> ImageTrial:
        return ImageTrial(size, layout, stage_bounds(found[-1], layout))

    return Ranks(IMAGE_LAYOUTS, make=trial, costs=costs).functions()


if __name__ == "__main__":
    serve(lambda: make(IMAGE_SIZES[sys.argv[2]]))
