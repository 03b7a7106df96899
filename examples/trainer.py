"""transformers' Trainer on a plan: one import and one argument differ.

The loop, schedules, logs and checkpoint folders are the Trainer's own. Optimizer states and
gradients are spread over the ranks; ParallelPlan(tp=2) would cut the layers, too.

    torchrun --standalone --nproc-per-node 2 examples/trainer.py
"""

import random

import torch
import torch.distributed as dist
import transformers
from transformers import TrainingArguments

from pyops.hf import Trainer  # was: from transformers import Trainer
from pyops.parallel import ParallelPlan
from pyops.zero import ZeroConfig

transformers.set_seed(0)
config = transformers.GPT2Config(
    vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
)
model = transformers.GPT2LMHeadModel(config)
text = torch.tensor(list(random.__doc__.encode()))
rows = [{"input_ids": row, "labels": row} for row in text.unfold(0, 64, 16)]
arguments = TrainingArguments(
    output_dir="trained",
    max_steps=40,
    learning_rate=3e-3,
    per_device_train_batch_size=8,
    logging_steps=39,
    save_steps=40,
    report_to="none",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
plan = ParallelPlan(zero=ZeroConfig(stage=2))
trainer = Trainer(model=model, args=arguments, train_dataset=rows, plan=plan)  # plan= is new
before = trainer.evaluate(rows[:16])["eval_loss"]
trainer.train()
after = trainer.evaluate(rows[:16])["eval_loss"]
trainer.save_model("trained/last")  # every rank takes part; rank 0 writes
if trainer.is_world_process_zero():
    print(f"loss {before:.3f} before, loss {after:.3f} after")
if dist.is_initialized():
    dist.destroy_process_group()
