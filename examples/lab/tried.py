"""Step 4, the best compromise, priced and then run: layouts of two devices by what their layers and
links take here, the first three of them tried.

torchrun --standalone --nproc-per-node 2 examples/lab/tried.py
"""

import statistics
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from tiny import make_batch, make_model

import pyops
from pyops.mesh import Mesh
from pyops.parallel import LayeredModel, parallelize
from pyops.plan import PYOPS, ImageCase, ImageShape, Layout, Machine, image_step, measure_layers
from pyops.plan.costs.images import stage_bounds
from pyops.plan.settings import parallel_plan

BATCH, STEPS, RUN = 32, 9, 3
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
shape = ImageShape(make_model().config, "lab")
found = replace(measure_layers(shape, images=(2, BATCH // ranks)), straggling=0.0)
case = ImageCase(shape, Machine.here().cluster(), PYOPS, "fp32", found)
layouts = [
    Layout(
        pp=pp,
        dp=ranks // pp,
        schedule="1f1b" if pp > 1 else "none",
        micro_batch=micro,
        num_microbatches=BATCH * pp // (ranks * micro),
    )
    for pp in sorted({1, ranks})
    for micro in (1, 2, 4, 8, 16)
    if ranks * micro <= BATCH
]


def step_of(layout):
    """Seconds of a step here, of the slowest rank."""
    plan = parallel_plan(layout, precision="fp32")
    cut = replace(plan.pipeline, boundaries=stage_bounds(case, layout) if layout.pp > 1 else None)
    model = LayeredModel(
        make_model(),
        names=tuple(layer.name for layer in shape.layers),
        costs=(1.0,) * shape.num_layers,
        inputs="images_BCHW",
    )
    trainer = parallelize(
        model,
        replace(plan, pipeline=cut),
        mesh=Mesh(plan.axes(ranks)),
        optimizer=lambda several: pyops.optim.AdamW(several, lr=1e-3),
        loss=(lambda nats, batch: nats, lambda batch: float(len(batch["labels_B"]))),
    )
    images, labels = make_batch(BATCH // layout.dp, trainer.mesh.rank("dp"))
    seconds = []
    for _ in range(STEPS + 1):
        dist.barrier()
        start = time.perf_counter()
        trainer.step({"images_BCHW": images, "labels_B": labels, "reduction": "sum"})
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(seconds[1:]))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return 1000 * float(slowest)


priced = {layout: 1000 * image_step(case, layout).total for layout in layouts}
for number, layout in enumerate(sorted(priced, key=priced.get)):
    ran = f", measured {step_of(layout):5.0f}" if number < RUN else ""
    if rank == 0:
        micro = f"{layout.num_microbatches:2} x {layout.micro_batch:2} images"
        print(f"{layout!s:6} {micro}: predicted {priced[layout]:5.0f} ms{ran}")
dist.destroy_process_group()
