"""Training from scratch on any number of ranks, with checkpoints.

The text is the source of Python's standard library. A run that was killed goes on from its last
checkpoint when it is started again, also on another number of ranks; `pretrained/` is removed to
start anew. The number of steps may be given.

    torchrun --standalone --nproc-per-node 2 examples/pretrain.py [steps]
"""

import inspect
import random
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import pyops
from pyops.parallel import ParallelPlan, parallelize

STEPS, EVERY, ROWS, TOKENS = 40, 10, 8, 64
CHECKPOINT = Path("pretrained/checkpoint")

dist.init_process_group("gloo")
torch.manual_seed(0)  # every rank makes the same model
config = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
plan = ParallelPlan(pp=2 if dist.get_world_size() % 2 == 0 else 1, max_grad_norm=1.0)
trainer = parallelize(
    transformers.LlamaForCausalLM(config), plan, optimizer=lambda p: pyops.optim.AdamW(p, lr=5e-3)
)
print_ = print if dist.get_rank() == 0 else lambda *_: None
source = "".join(map(inspect.getsource, (random, statistics)))
text = torch.tensor(list(source.encode()))

if CHECKPOINT.exists():
    trainer.load(CHECKPOINT)
    print_(f"goes on after step {trainer.num_steps}")
last = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
while trainer.num_steps < last:
    # the step alone says which rows come: a run that goes on sees those that it would have seen
    places = torch.Generator().manual_seed(trainer.num_steps)
    first = torch.randint(len(text) - TOKENS, (ROWS,), generator=places).tolist()
    rows = torch.stack([text[i : i + TOKENS] for i in first])
    own = rows.tensor_split(trainer.mesh.size("dp"))[trainer.mesh.rank("dp")]
    loss = trainer.step({"input_ids": own, "labels": own})
    if trainer.num_steps % EVERY == 0 or trainer.num_steps in (1, last):
        print_(f"step {trainer.num_steps:3} loss {loss:.4f}")
    if trainer.num_steps % EVERY == 0 or trainer.num_steps == last:
        trainer.save(CHECKPOINT)  # an older one is replaced when this one is whole
dist.destroy_process_group()
