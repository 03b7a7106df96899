"""LoRA by PEFT with ZeRO stage 2: only the adapters and the head have gradients and optimizer
states, and these are spread over the ranks.

The ZeroOptimizer is made of what `get_peft_model` returns; frozen weights stay as they are. Rank 0
writes the adapters in PEFT's own format.

    torchrun --standalone --nproc-per-node 2 examples/peft_lora.py
"""

import random

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model

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
)
base = transformers.LlamaForCausalLM(config)  # or from_pretrained("a folder")
# the head is trained too, for this base knows nothing yet; leave modules_to_save out for yours
lora = LoraConfig(r=16, target_modules="all-linear", modules_to_save=["lm_head"])
model = get_peft_model(base, lora)
optimizer = ZeroOptimizer(model, pyops.optim.AdamW, ZeroConfig(stage=2, max_grad_norm=1.0), lr=1e-2)

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

with optimizer.whole_parameters():  # every rank takes part
    if rank == 0:
        model.save_pretrained("adapters")
dist.destroy_process_group()
