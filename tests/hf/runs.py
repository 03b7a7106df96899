"""Runs of a tiny GPT-2 by the Trainer and by Accelerate's loop, in the workers of a pool."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.parallel import ParallelPlan
from pyops.zero import ZeroConfig

VOCABULARY, LENGTH, ROWS = 50, 8, 64
CLIPPED = 0.05  # less than any gradient's norm here


@contextmanager
def alone() -> Iterator[None]:
    """This process by itself, and no state of Accelerate's afterwards."""
    from accelerate.state import AcceleratorState

    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def launched(rank: int, group: Any) -> Iterator[None]:
    """The variables that torchrun sets, and no state of Accelerate's before or afterwards."""
    from accelerate.state import AcceleratorState

    size = str(dist.get_world_size(group))
    told = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
    }
    before = dict(os.environ)
    os.environ.update(told)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


def gpt2(*, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config).to(dtype)


def rows(number: int = ROWS) -> list[dict[str, Tensor]]:
    """Sequences in which some labels are left out, each row's own number of them."""
    found = []
    for row, x in enumerate(
        torch.randint(0, VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(7))
    ):
        labels = x.clone()
        labels[: row % 5] = -100
        found.append({"input_ids": x, "labels": labels})
    return found


def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """As transformers', in the dtype of the model: transformers computes it in float32, whatever
    the model is."""
    logits = outputs.logits[:, :-1].reshape(-1, VOCABULARY)
    total = nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum")
    return total / (
        num_items_in_batch if num_items_in_batch is not None else (labels[:, 1:] != -100).sum()
    )


class Recorded:
    """The part of a Trainer that notes the loss of every micro-batch, before the Trainer rounds it
    to float32."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.__dict__.setdefault("losses", []).append(loss.item())
        return loss


def trainer(
    folder: str,
    model: Any,
    zero: ZeroConfig | ParallelPlan | None,
    *,
    given: Any = None,
    **options: Any,
) -> Any:
    """A ZeroTrainer, that of a plan, or where it is None the Trainer itself, which wraps the model
    in DistributedDataParallel where there are several ranks."""
    import transformers

    from pyops.hf import PlanTraining, ZeroTraining

    common: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 5,
        "learning_rate": 3e-2,
        "weight_decay": 0.1,
        "max_grad_norm": CLIPPED,
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "warmup_steps": 2,
    }
    args = transformers.TrainingArguments(**common | options)
    planned = isinstance(zero, ParallelPlan)
    ours = () if zero is None else (PlanTraining,) if planned else (ZeroTraining,)
    bases = (Recorded, *ours, transformers.Trainer)
    more = {} if zero is None else {"plan" if planned else "zero": zero}
    data = rows()
    made = {
        "model": model,
        "args": args,
        "train_dataset": data,
        "eval_dataset": data[:8],
        "compute_loss_func": loss_of,
    }
    quiet = {"log": lambda self, logs, *_: self.state.log_history.append(dict(logs))}
    return type("Trained", bases, quiet)(**(made | more | dict(given or {})))


def finished(run: Any) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """(losses of the micro-batches, norms of the steps, weights) of a run that trained; its
    optimizer lets go of the model."""
    if getattr(run, "zero_optimizer", None) is not None:
        run.zero_optimizer.close()
    norms = [float(logs["grad_norm"]) for logs in run.state.log_history if "grad_norm" in logs]
    return run.losses, norms, {name: p.detach().clone() for name, p in run.model.named_parameters()}
