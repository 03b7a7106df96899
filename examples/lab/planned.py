"""The four steps planned for the course's machine: CoAtNet-0 to 7 on a node of eight devices of 80
GB, in bf16 with AdamW. Nothing is measured, and no device is needed.

python examples/lab/planned.py                  or: ... 512, for images of 512 pixels
"""

import sys
from dataclasses import replace
from itertools import pairwise

from pyops.plan import (
    PYOPS,
    ImageCase,
    ImageShape,
    Layout,
    Options,
    best,
    image_memory,
    load_cluster,
)
from pyops.plan.costs.images import stage_bounds

GB, LIMIT = 1e9, 80
pixels = int(sys.argv[1]) if len(sys.argv) > 1 else 224
cluster = load_cluster("a100").with_devices(8)
exact = replace(PYOPS, fragmentation=1.0)  # bytes of tensors alone, as steps 1 to 3 count them
shapes = [ImageShape.named(f"coatnet-{n}").with_image_size(pixels) for n in range(8)]


def states_of(layers):
    return 16 * sum(layer.parameters for layer in layers) / GB


def image_of(layers):
    return sum(layer.kept_bytes(1, element=2) for layer in layers) / GB


print(f"step 1: images of {pixels} pixels on one device of {LIMIT} GB")
for shape in shapes:
    states, image = states_of(shape.layers), image_of(shape.layers)
    most = max(0, int((LIMIT - states) / image))
    print(
        f"  {shape.name}: states {states:4.1f} GB, an image {1000 * image:5.0f} MB, {most} images"
    )

print("step 2: GB of parameters, gradients and states on eight devices, ZeRO 0 to 3")
for shape in shapes:
    case, kept = ImageCase(shape, cluster, exact, "bf16"), []
    for stage in range(4):
        found = image_memory(case, Layout(dp=8, zero=stage))
        kept.append((found.parameters + found.gradients + found.states) / GB)
    print(f"  {shape.name}: " + " ".join(f"{each:5.1f}" for each in kept))

print("step 3: stages of coatnet-4, cut by time")
case = ImageCase(shapes[4], cluster, exact, "bf16")
for number in (2, 4, 8):
    bounds = stage_bounds(case, Layout(pp=number, dp=8 // number, schedule="1f1b", micro_batch=8))
    for stage, (first, end) in enumerate(pairwise(bounds)):
        layers = shapes[4].layers[first:end]
        cut = f"{stage} of {number}: layers {first} to {end - 1}"
        states, image = states_of(layers), image_of(layers)
        print(f"  {cut:23} states {states:4.2f} GB, an image {1000 * image:4.0f} MB")

print("step 4: the best layout for 4,096 images a step")
for shape in shapes:
    plan = best(shape, cluster, Options(batch=4096))
    layout, gib = plan.layout, plan.best.memory.gib
    again = ", blocks recomputed" if layout.recompute == "block" else ""
    micro = f"{layout.num_microbatches} x {layout.micro_batch} images{again}"
    speed = f"{plan.tokens_per_second():,.0f} images a second each"
    print(f"  {shape.name}: {layout}, ZeRO {layout.zero}, {micro}: {gib:.0f} GiB, {speed}")
