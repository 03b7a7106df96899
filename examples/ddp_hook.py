"""torch's DistributedDataParallel, with gradients of 8 bits and a fused AdamW.

Two lines of an ordinary script differ: the optimizer's class, and the hook which sends a quarter of
the bytes and adds what was rounded off to the next step's gradients.

    torchrun --standalone --nproc-per-node 2 examples/ddp_hook.py
"""

import random

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel

import pyops
from pyops.comm import Int8

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
config = transformers.GPT2Config(
    vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
)
module = transformers.GPT2LMHeadModel(config)
model = DistributedDataParallel(module)
model.register_comm_hook(*pyops.comm.ddp_hook(Int8(), model=module))
optimizer = pyops.optim.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)

data = torch.tensor(list(random.__doc__.encode()) * 4)
starts = torch.Generator().manual_seed(rank)  # each rank reads other places of the text
for step in range(40):
    first = torch.randint(len(data) - 64, (16 // ranks or 1,), generator=starts)
    rows = torch.stack([data[i : i + 64] for i in first.tolist()])
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (0, 39) and rank == 0:
        print(f"step {step + 1:2} loss {loss.item():.3f}")
dist.destroy_process_group()
