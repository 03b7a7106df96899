"""A training step of one Llama of transformers by several libraries: what each rank of a
`rank_teams.Team` makes of its name.

    python -m benchmarks.parallel.tensor.llama_teams NAME SIZE

All start from the same weights and see the same global batch: the copies of the model share its
rows out, and the ranks of one copy have all of them. Each step returns its loss; a rank that has
none, of a pipeline, says None. Ours is made by a plan; each rival as its documentation says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.instruments.rank_teams import serve

__all__ = ["OURS", "RIVALS", "SIZES", "Size", "make"]

LR, WEIGHT_DECAY = 1e-4, 0.01
CHECKED_STEPS = 3
PROMPT, NEW_TOKENS = 16, 64
Functions = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Size:
    """A Llama and its global batch."""

    width: int
    layers: int
    inner: int
    heads: int
    vocabulary: int
    rows: int
    length: int


SIZES = {
    "small": Size(512, 8, 1376, 8, 4096, rows=4, length=128),
    "tiny": Size(64, 4, 128, 4, 256, rows=4, length=16),
}
# ours by name -> fields of the plan; "stage" is ZeRO's
OURS: dict[str, dict[str, Any]] = {
    **{f"pyops, ZeRO stage {stage}": {"stage": stage} for stage in range(4)},
    "pyops, tp = 2": {"tp": 2},
    "pyops, pp = 2": {"pp": 2},
    "pyops, one process": {},
}


def llama(size: Size) -> nn.Module:
    """The model, with the same values on every rank."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


def rows_of(size: Size, *, copies: int = 1) -> Tensor:
    """This rank's rows of the global batch."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(size.vocabulary, (size.rows, size.length), generator=generator)
    return rows.chunk(copies)[dist.get_rank() if copies > 1 else 0]


def prompt_of(size: Size) -> Tensor:
    return rows_of(size)[:1, :PROMPT]


def adamw(parameters: Any, *, fused: bool = True) -> torch.optim.Optimizer:
    """torch's, which all rivals step with."""
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=WEIGHT_DECAY, fused=fused)


def ours(name: str, size: Size) -> Functions:
    """By a plan; and a loop by hand over the parts that the trainer is made of."""
    from pyops.optim import AdamW
    from pyops.parallel import ParallelPlan, parallelize
    from pyops.zero import ZeroConfig

    plan = dict(OURS[name])
    zero = ZeroConfig(stage=plan.pop("stage", 0))
    make_optimizer = partial(AdamW, lr=LR, weight_decay=WEIGHT_DECAY)
    trainer = parallelize(llama(size), ParallelPlan(**plan, zero=zero), optimizer=make_optimizer)
    rows = rows_of(size, copies=trainer.mesh.size("dp"))
    batch = {"input_ids": rows, "labels": rows}
    count = size.rows * (size.length - 1)
    parts = trainer.parts

    def by_hand() -> None:
        if parts.staged is None:
            logits = parts.model(input_ids=rows, use_cache=False).logits
            shifted, targets = logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()
            (functional.cross_entropy(shifted, targets, reduction="sum") / count).backward()
        else:
            arguments = {"input_ids": rows, "use_cache": False}
            with parts.optimizer.no_sync():
                parts.staged.step(arguments, batch, rows=len(rows), scale=1 / count)
        parts.optimizer.step()
        parts.optimizer.zero_grad()

    def generate() -> list[int]:
        found = trainer.generate(prompt_of(size), max_new_tokens=NEW_TOKENS)
        return [int(token) for token in found[0]]

    return {"step": lambda: trainer.step(batch), "by hand": by_hand, "generate": generate}


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor
) -> Callable[[], float]:
    """The loop that everybody writes."""

    def step() -> float:
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def one_process(size: Size) -> Functions:
    """transformers and torch alone."""
    model: Any = llama(size)
    step = plain_step(model, adamw(model.parameters()), rows_of(size))

    @torch.no_grad()
    def generate() -> list[int]:
        model.eval()
        found = model.generate(
            prompt_of(size),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            use_cache=True,
            attention_mask=torch.ones(1, PROMPT, dtype=torch.long),
            pad_token_id=0,
        )
        model.train()
        return [int(token) for token in found[0]]

    return {"step": step, "generate": generate}


def torch_ddp(size: Size) -> Functions:
    model = nn.parallel.DistributedDataParallel(llama(size))
    rows = rows_of(size, copies=dist.get_world_size())
    return {"step": plain_step(model, adamw(model.parameters()), rows)}


def accelerate_fsdp2(size: Size) -> Functions:
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # it leaves the plugin aside on processors; all that follows works there
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    made = llama(size)
    model, optimizer = accelerator.prepare(made, adamw(made.parameters()))
    if "DTensor" not in type(next(model.parameters())).__name__:
        raise RuntimeError("Accelerate has not sharded the model")
    rows = rows_of(size, copies=dist.get_world_size())

    def step() -> float:
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return {"step": step}


def deepspeed(stage: int, size: Size) -> Functions:
    import deepspeed as library

    library.init_distributed("gloo", verbose=False)
    model = llama(size)
    rows = rows_of(size, copies=dist.get_world_size())
    config = {
        "train_micro_batch_size_per_gpu": len(rows),
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # else 1.0, since DeepSpeed 0.19
        "steps_per_print": 10**9,
    }
    engine, *_ = library.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def step() -> float:
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return {"step": step}


def torch_tensor_parallel(size: Size) -> Functions:
    """DTensor, with the plan that transformers' config of Llama has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model: Any = llama(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns, across = (
        ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        ("o_proj", "down_proj"),
    )
    plan: dict[str, Any] = {f"model.layers.*.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.*.{name}": RowwiseParallel() for name in across}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    # fused AdamW takes no tensors of both kinds, and the norms are no DTensors
    optimizer = adamw(model.parameters(), fused=False)
    return {"step": plain_step(model, optimizer, rows_of(size))}


class Stage(nn.Module):
    """Half of a Llama, cut by hand."""

    def __init__(self, model: Any, first: int, last: int) -> None:
        super().__init__()
        self.layers = model.model.layers[first:last]
        self.rotary = model.model.rotary_emb
        self.embedding = model.model.embed_tokens if first == 0 else None
        ends = last == len(model.model.layers)
        self.norm: Any = model.model.norm if ends else None
        self.head: Any = model.lm_head if ends else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        angles = self.rotary(x, position_ids=torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=angles)
        return x if self.norm is None else self.head(self.norm(x))


def torch_pipelining(size: Size) -> Functions:
    """1F1B of as many micro-batches as ours has."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = Stage(llama(size), rank * size.layers // ranks, (rank + 1) * size.layers // ranks)
    stage = PipelineStage(own, rank, ranks, torch.device("cpu"))

    def loss_of(logits: Tensor, rows: Tensor) -> Tensor:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())

    schedule = Schedule1F1B(stage, n_microbatches=2 * ranks, loss_fn=loss_of)
    optimizer = adamw(own.parameters())
    rows = rows_of(size)

    def step() -> float | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(rows)
        else:
            schedule.step(target=rows, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else None

    return {"step": step}


RIVALS: dict[str, Callable[[Size], Functions]] = {
    "transformers, one process": one_process,
    "torch DDP": torch_ddp,
    "Accelerate + FSDP2": accelerate_fsdp2,
    **{f"DeepSpeed ZeRO {stage}": partial(deepspeed, stage) for stage in (1, 2, 3)},
    "torch parallelize_module": torch_tensor_parallel,
    "torch pipelining": torch_pipelining,
}


def resident(field: str) -> int:
    """A field of this process' memory, in bytes: "VmRSS" or its peak, "VmHWM"."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0


def make(name: str, size: Size) -> Functions:
    """The functions of one rank: step, check and memory, and what else the library offers."""
    functions_of = partial(ours, name) if name in OURS else RIVALS[name]
    torch.set_num_threads(1)
    import transformers.models.llama.modeling_llama  # noqa: F401  no part of any library's memory

    if int(os.environ["WORLD_SIZE"]) > 1 and not name.startswith(("Accelerate", "DeepSpeed")):
        dist.init_process_group("gloo")
    imported = resident("VmRSS")
    functions = functions_of(size)
    step = functions["step"]

    def check() -> list[float | None]:
        return [step() for _ in range(CHECKED_STEPS)]

    def memory() -> list[int]:
        return [imported, resident("VmHWM")]

    return {**functions, "check": check, "memory": memory}


def waiting(functions: Functions) -> Functions:
    """Each after a barrier, so that no rank begins alone."""

    def after_barrier(call: Callable[[], Any]) -> Any:
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))
        return call()

    return {name: partial(after_barrier, call) for name, call in functions.items()}


if __name__ == "__main__":
    serve(lambda: waiting(make(sys.argv[1], SIZES[sys.argv[2]])))
