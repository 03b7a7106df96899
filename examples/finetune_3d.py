"""A folder in, a folder out: a model of transformers over tensor parallelism and a pipeline.

Each rank reads its part of the folder alone. Four ranks cut every layer in two and the layers into
two stages, two ranks make a pipeline, one rank has everything; the losses are the same. Without an
argument the folder is a tiny Llama made here.

    torchrun --standalone --nproc-per-node 4 examples/finetune_3d.py [folder]
"""

import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import pyops
from pyops.parallel import ParallelPlan, parallelize

LAYOUTS = {1: {}, 2: {"pp": 2}, 4: {"tp": 2, "pp": 2}}

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("llama")
if len(sys.argv) == 1 and rank == 0:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
dist.barrier()

plan = ParallelPlan(**LAYOUTS.get(ranks, {}), max_grad_norm=1.0)
trainer = parallelize(folder, plan, optimizer=lambda p: pyops.optim.AdamW(p, lr=5e-3))
text = torch.tensor(list(random.__doc__.encode())[: 8 * 64]).view(8, 64)
own = text.tensor_split(trainer.mesh.size("dp"))[trainer.mesh.rank("dp")]  # of this copy
batch = {"input_ids": own, "labels": own}
before = trainer.evaluate([batch])
for _ in range(30):
    trainer.step(batch)
after = trainer.evaluate([batch])
said = trainer.generate(text[:1, :16], max_new_tokens=16)
trainer.save_pretrained("finetuned")
if rank == 0:
    print(f"loss {before:.5f} before, loss {after:.5f} after")
    print(f"text {bytes(said[0].tolist())!r}")
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained("finetuned")
        print(f"loss {model(input_ids=text, labels=text).loss.item():.5f} by transformers")
dist.destroy_process_group()
