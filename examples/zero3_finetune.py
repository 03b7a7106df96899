"""ZeRO stage 3 in a plain loop: parameters, gradients and optimizer states are spread over the
ranks.

The model is a Llama of transformers without a wrapper. Rank 0 writes the result, which
`from_pretrained` reads.

    torchrun --standalone --nproc-per-node 2 examples/zero3_finetune.py
"""

import random

import torch
import torch.distributed as dist
import transformers

import pyops
from pyops.zero import ZeroConfig, ZeroOptimizer

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)
model = transformers.LlamaForCausalLM(config)  # or from_pretrained("a folder")
optimizer = ZeroOptimizer(model, pyops.optim.AdamW, ZeroConfig(stage=3, max_grad_norm=1.0), lr=5e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)

data = torch.tensor(list(random.__doc__.encode()) * 4)
starts = torch.Generator().manual_seed(rank)  # each rank reads other places of the text
for step in range(40):
    first = torch.randint(len(data) - 64, (16 // ranks or 1,), generator=starts)
    rows = torch.stack([data[i : i + 64] for i in first.tolist()])
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step in (0, 39) and rank == 0:
        print(f"step {step + 1:2} loss {loss.item():.3f}")

with optimizer.whole_parameters():  # every rank takes part
    if rank == 0:
        model.save_pretrained("zero3_finetuned")
dist.destroy_process_group()
