"""Step 3, a pipeline: 1F1B with 1 to 8 micro-batches, the loss of one process, and its bubble.

torchrun --standalone --nproc-per-node 2 examples/lab/pipeline.py
"""

import torch
import torch.distributed as dist
from tiny import make_batch, make_model
from torch.nn.functional import cross_entropy

from pyops.pipeline import Pipeline, PipelineConfig, balance, profile, schedule, simulate

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
images, labels = make_batch(16)
whole = make_model().loss(images, labels).item()
measured = profile(make_model().layers(), images[:2], rounds=3)
bounds = balance(measured, num_stages=ranks)
for stage in range(ranks if rank == 0 else 0):
    first, end = bounds[stage], bounds[stage + 1]
    print(
        f"stage {stage}: layers {first} to {end - 1}, "
        f"states {measured.weights(first, end) / 2**20:.2f} MiB, "
        f"kept of an image {measured.kept(first, end) / 2 / 2**20:.2f} MiB"
    )
for number in (1, 2, 4, 8):
    made = schedule("1f1b", num_stages=ranks, num_microbatches=number)
    pipeline = Pipeline(
        make_model().layers(),
        schedule=made,
        group=dist.group.WORLD,
        loss=cross_entropy,
        config=PipelineConfig(boundaries=bounds),
    )
    loss = float(pipeline.step(images, labels))
    pipeline.close()
    bubble = simulate(made, measured.costs(bounds)).bubble
    if rank == 0:
        print(
            f"{number} micro-batches: loss {loss:.6f}, of one process {whole:.6f}; idle "
            f"{bubble:.0%}, with even stages {(ranks - 1) / (number + ranks - 1):.0%}"
        )
dist.destroy_process_group()
