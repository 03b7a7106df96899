"""Step 2, ZeRO: bytes of parameters, gradients and states at stages 0 to 3, and the same losses.

torchrun --standalone --nproc-per-node 2 examples/lab/zero.py
"""

import torch.distributed as dist
from tiny import make_batch, make_model

import pyops
from pyops.zero import ZeroConfig, ZeroOptimizer

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
first = None
for stage in range(4):
    model = make_model()
    optimizer = ZeroOptimizer(model, pyops.optim.AdamW, ZeroConfig(stage=stage), lr=1e-3)
    losses = []
    for step in range(3):
        images, labels = (t.chunk(ranks)[rank] for t in make_batch(16, step))
        loss = model.loss(images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    first = first or losses
    kept = sum(optimizer.memory().values())
    number = sum(p.numel() for p in make_model().parameters())
    shared = (0, 8, 12, 16)[stage]  # of the 16 bytes of a parameter: moments, gradients, all
    if rank == 0:
        print(
            f"stage {stage}: {kept / number:5.2f} bytes a parameter, "
            f"by the formula {16 - shared + shared / ranks:5.2f}; "
            f"losses {'equal' if losses == first else 'differ'}, the last {losses[-1]:.4f}"
        )
dist.destroy_process_group()
