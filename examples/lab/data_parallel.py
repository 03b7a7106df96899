"""Step 1, limits of data parallelism: the largest batch for given bytes, predicted by a profile,
then searched for in a process that gets no more.

    python examples/lab/data_parallel.py            or: ... 64, for 64 MiB
"""

import ctypes
import resource
import sys
from pathlib import Path

import torch
from tiny import make_batch, make_model

import pyops
from pyops.mesh import ALONE
from pyops.pipeline import profile

MIB = 1 << 20
limit = int(sys.argv[1]) * MIB if len(sys.argv) > 1 else 48 * MIB
c_library = ctypes.CDLL(None)
for option in (-3, -1):  # of malloc: what is freed goes back to the system at once
    c_library.mallopt(option, 1 << 16)
torch.set_num_threads(1)
model = make_model(norm="batch")
optimizer = pyops.optim.AdamW(model.parameters(), lr=1e-3)

measured = profile(model.layers(), make_batch(8)[0], rounds=1, warmup=0, group=ALONE)
states = measured.weights(0, len(measured))  # weights, gradients, two moments: 16 bytes each
image = measured.kept(0, len(measured)) / 8
predicted = int((limit - states) / image)
print(f"states {states / MIB:.1f} MiB, kept of an image {image / MIB:.2f} MiB")
print(f"predicted: {predicted} images in {limit // MIB} MiB")


def step(count):
    images, labels = make_batch(count)
    model.loss(images, labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def fits(count):
    c_library.malloc_trim(0)
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    held = int(status["VmData"].split()[0]) * 1024  # the states among it
    old = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(held + limit - states), old[1]))
    try:
        step(count)
    except (RuntimeError, MemoryError):
        optimizer.zero_grad()
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, old)
    return True


step(2)  # makes the moments
most, too_many = 1, 2
while fits(too_many):
    most, too_many = too_many, 2 * too_many
while too_many - most > 1:
    middle = (most + too_many) // 2
    most, too_many = (middle, too_many) if fits(middle) else (most, middle)
print(f"measured:  {most} images")
