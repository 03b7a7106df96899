"""`tests.odd_input.callables` over the ranks of a group: no signal, no rank that waits, an error or
the right result on each.

Every rank has the odd tensor; of a pipeline, the rank whose stage takes it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm import all_gather
from pyops.pipeline import Pipeline, PipelineConfig, schedule
from pyops.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    clip_grad_norm_,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from tests.odd_input.callables import CALLS, EXCUSED, TORCHS, Call, of_layer, problem
from tests.odd_input.rooms import Between, linear
from tests.odd_input.tensors import ODD, WITHOUT_MEMORY

__all__ = ["RANK_CALLS", "odd_ones_for", "wrong_on_ranks"]


def _floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _words() -> Tensor:
    return torch.tensor([[1, 5, 2], [0, 3, 4]])


def _group() -> Any:
    return dist.group.WORLD


def _layer(kind: Any, *sizes: int) -> Call:
    return of_layer(lambda: kind(*sizes, group=_group()))


def _pipelined(place: str) -> Call:
    """A step, and one after it that has nothing odd: after an error the ranks must be able to go
    on."""

    def call(t: Tensor) -> list[Tensor]:
        middle = Between(
            None, beside=t if place == "sent" else None, alone=t if place == "sent alone" else None
        )
        layers = [linear(8, 8), middle, Behind()]
        made = Pipeline(
            layers,
            schedule=schedule("1f1b", num_stages=2, num_microbatches=2),
            group=_group(),
            loss=_loss,
            config=PipelineConfig(boundaries=[0, 2, 3]),
        )
        batch, target = (
            t if place == each else _floats(4, n) for each, n in (("batch", 8), ("target", 3))
        )
        try:
            loss = made.step(batch, target)
            return [loss, *(p.grad.clone() for p in made.parameters() if p.grad is not None)]
        finally:
            middle.beside = middle.alone = None
            made.zero_grad()
            assert made.step(_floats(4, 8), _floats(4, 3)).isfinite()
            made.close()

    return call


class Behind(nn.Module):
    """Takes what came beside, where something did."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(8, 3)

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        y: Tensor = self.layer(x)
        return y if beside is None else y * beside.to(y.dtype).sum()


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(y, target)


def _clipped(t: Tensor) -> list[Tensor]:
    layer = ColumnParallelLinear(8, 8, group=_group())
    layer.bias.grad, layer.weight.grad = torch.ones(4), t
    return [clip_grad_norm_(layer, 0.5, group=_group()), layer.weight.grad.clone()]


ALIKE = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "compressed_all_reduce",
    "compressed_reduce_scatter",
    "compressed_all_gather",
    "checkpoint state",
    "checkpoint own",
    "checkpoint into",
    "overflowed",
    "DataParallel",
    "DataParallel gradient",
    *(f"ZeroOptimizer stage {stage}" for stage in (1, 2, 3)),
)
RANK_CALLS: dict[str, tuple[Callable[[], Tensor], Call]] = {
    **{name: CALLS[name] for name in ALIKE},
    "all_gather out": (
        lambda: _floats(8, 8),
        lambda t: all_gather(_floats(4, 8), out=t, group=_group()),
    ),
    "ColumnParallelLinear": (lambda: _floats(4, 8), _layer(ColumnParallelLinear, 8, 6)),
    "RowParallelLinear": (lambda: _floats(4, 4), _layer(RowParallelLinear, 8, 6)),
    "ParallelMLP": (lambda: _floats(4, 8), _layer(ParallelMLP, 8, 16)),
    "ParallelAttention": (lambda: _floats(2, 3, 8), _layer(ParallelAttention, 8, 2)),
    "VocabParallelEmbedding": (_words, _layer(VocabParallelEmbedding, 8, 4)),
    "vocab_parallel_cross_entropy logits": (
        lambda: _floats(2, 3, 4),
        lambda t: vocab_parallel_cross_entropy(t, _words(), group=_group()),
    ),
    "vocab_parallel_cross_entropy targets": (
        _words,
        lambda t: vocab_parallel_cross_entropy(_floats(2, 3, 4), t, group=_group()),
    ),
    "linear_cross_entropy hidden": (
        lambda: _floats(2, 3, 8),
        lambda t: linear_cross_entropy(t, _floats(4, 8), _words(), group=_group()),
    ),
    "linear_cross_entropy weight": (
        lambda: _floats(4, 8),
        lambda t: linear_cross_entropy(_floats(2, 3, 8), t, _words(), group=_group()),
    ),
    "clip_grad_norm_": (lambda: _floats(4, 8), _clipped),
    "Pipeline batch": (lambda: _floats(4, 8), _pipelined("batch")),
    "Pipeline target": (lambda: _floats(4, 3), _pipelined("target")),
    "Pipeline sent": (lambda: _floats(2, 8), _pipelined("sent")),
    "Pipeline sent alone": (lambda: _floats(2, 8), _pipelined("sent alone")),
}
WAITED = re.compile(r"timed out[^\n]*|timeout[^\n]*|closed by peer[^\n]*", re.IGNORECASE)
TOO = {
    **{(name, "too short"): TORCHS for name in ("Pipeline batch", "Pipeline target")},
    (
        "clip_grad_norm_",
        "overlapping",
    ): "scaled in place, as torch's clip_grad_norm_ does: shared elements twice",
}


def odd_ones_for(name: str, *, every: bool) -> list[str]:
    """Names of odd tensors for a callable: all, or a fifth, another one for the next callable, and
    one without memory."""
    first = list(RANK_CALLS).index(name)
    names = [odd for odd in ODD if (name, odd) not in EXCUSED and (name, odd) not in TOO]
    return (
        names
        if every
        else list(
            dict.fromkeys([*names[first % 5 :: 5], *(o for o in WITHOUT_MEMORY[:1] if o in names)])
        )
    )


def wrong_on_ranks(rank: int, group: Any, name: str, odd_ones: list[str]) -> list[str]:
    """A body for the pool: what is wrong on this rank. An error for which a rank waited until the
    group's timeout is wrong."""
    torch.set_num_threads(1)
    make, call = RANK_CALLS[name]
    found, odd = [], ""

    def telling(t: Tensor) -> Any:
        try:
            return call(t)
        except Exception as error:
            if waited := WAITED.search("".join(traceback.format_exception(error))):
                found.append(f"{name}, {odd}, rank {rank}: a rank waited for another: {waited[0]}")
            raise

    for odd in odd_ones:
        if (wrong := problem(name, odd, calls={name: (make, telling)})) is not None:
            found.append(f"{name}, {odd}, rank {rank}: {wrong}")
    return found
