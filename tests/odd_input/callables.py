"""What takes tensors beside the ops and the optimizers, one process, with each odd tensor; run in a
process that may die.

    python -m tests.odd_input.callables all FIRST

A call must raise, or give what it gives for an ordinary copy of the odd tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import pyops
from pyops import checkpoint, precision, recompute
from pyops.comm import (
    all_gather,
    all_reduce,
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
    reduce_scatter,
)
from pyops.comm.compression.eight_bit import Int8
from pyops.comm.compression.one_bit import OneBit
from pyops.data_parallel import DataParallel
from pyops.flat import FlatBuffer
from pyops.ops.memory import resolved_view
from pyops.optim import AdamW
from pyops.tensor_parallel import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelAttention,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    clip_grad_norm_,
    grad_norm,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.odd_input.rooms import ROOMS
from tests.odd_input.runs import folder_of_all, go_through
from tests.odd_input.tensors import ODD, WITHOUT_MEMORY, bits_of

REFUSALS = (
    TypeError,
    ValueError,
    NotImplementedError,
    RuntimeError,
    IndexError,
    checkpoint.CheckpointError,
)
Call = Callable[[Tensor], Any]


def _floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _words() -> Tensor:
    return torch.tensor([[1, 5, 2], [0, 3, 4]])


def _module(t: Tensor, *, gradient: bool = False) -> nn.Module:
    """A linear layer whose weight, or its gradient, is the tensor."""
    module = nn.Linear(8, 4)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(_floats(*p.shape))
    if gradient:
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        module.weight.grad = t
    else:
        module.weight = nn.Parameter(t)
    return module


def _saved(t: Tensor, *, own: bool) -> Any:
    with folder_of_all() as folder:
        where = f"{folder}/checkpoint"
        checkpoint.save(
            where, *(({"x": t},) if not own else ({},)), **({"own": {"x": t}} if own else {})
        )
        return checkpoint.load(where)[1 if own else 0]["x"].clone()


def _loaded(t: Tensor) -> Any:
    with folder_of_all() as folder:
        checkpoint.save(f"{folder}/c", {"x": _floats(4, 8)})
        return checkpoint.load(f"{folder}/c", into={"x": t})[0]["x"]


def _parallel(t: Tensor, *, gradient: bool) -> list[Tensor]:
    model = DataParallel(_module(t, gradient=gradient))
    model(_floats(2, 8)).sum().backward()
    return [*(p.detach().clone() for p in model.parameters()), *(b.grad for b in model.flat)]


def _zero(t: Tensor, stage: int) -> list[Tensor]:
    model = _module(t)
    optimizer = ZeroOptimizer(model, AdamW, ZeroConfig(stage=stage), lr=0.1)
    model(_floats(2, 8)).sum().backward()
    optimizer.step()
    with optimizer.whole_parameters() if stage == 3 else torch.no_grad():
        return [p.detach().clone() for p in model.parameters()]


def of_layer(make: Callable[[], nn.Module]) -> Call:
    def call(t: Tensor) -> Any:
        layer = make()
        y = layer(t)
        if not t.is_meta:
            y.sum().backward()
        return [y.detach(), *(p.grad for p in layer.parameters() if p.grad is not None)]

    return call


def _recomputed(t: Tensor) -> list[Tensor]:
    layer = _module(_floats(4, 8))
    y = recompute.checkpoint(layer, t)
    y.sum().backward()
    return [y.detach(), layer.weight.grad]


def _flat(t: Tensor, *, gradient: bool) -> list[Tensor]:
    module = _module(t, gradient=gradient)
    buffer = FlatBuffer(module.named_parameters())
    return [buffer.data.clone(), buffer.grad.clone()]


def _clipped(t: Tensor) -> list[Tensor]:
    module = _module(t, gradient=True)
    norm = grad_norm(module)
    clip_grad_norm_(module, 0.5)
    return [norm, module.weight.grad.clone()]


def _unscaled(t: Tensor) -> list[Tensor]:
    module = _module(t, gradient=True)
    scaler = precision.LossScaler(initial=4.0)
    optimizer = AdamW(module.parameters())
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return [p.detach().clone() for p in module.parameters()]


CALLS: dict[str, tuple[Callable[[], Tensor], Call]] = {
    "all_reduce": (lambda: _floats(4, 8), all_reduce),
    "reduce_scatter": (lambda: _floats(4, 8), reduce_scatter),
    "all_gather": (lambda: _floats(4, 8), all_gather),
    "compressed_all_reduce": (
        lambda: _floats(4, 8),
        lambda t: compressed_all_reduce(t, codec=OneBit()),
    ),
    "compressed_reduce_scatter": (
        lambda: _floats(4, 8),
        lambda t: compressed_reduce_scatter(t, codec=Int8()),
    ),
    "compressed_all_gather": (
        lambda: _floats(4, 8),
        lambda t: compressed_all_gather(t, codec=Int8()),
    ),
    "FlatBuffer": (lambda: _floats(4, 8), lambda t: _flat(t, gradient=False)),
    "FlatBuffer gradient": (lambda: _floats(4, 8), lambda t: _flat(t, gradient=True)),
    "checkpoint state": (lambda: _floats(4, 8), lambda t: _saved(t, own=False)),
    "checkpoint own": (lambda: _floats(4, 8), lambda t: _saved(t, own=True)),
    "checkpoint into": (lambda: _floats(4, 8), _loaded),
    "overflowed": (lambda: _floats(4, 8), lambda t: precision.overflowed([_floats(3), t])),
    "LossScaler": (lambda: _floats(4, 8), _unscaled),
    "LossScaler.scale": (lambda: _floats(4, 8), lambda t: precision.LossScaler().scale(t)),
    "DataParallel": (lambda: _floats(4, 8), lambda t: _parallel(t, gradient=False)),
    "DataParallel gradient": (lambda: _floats(4, 8), lambda t: _parallel(t, gradient=True)),
    **{
        f"ZeroOptimizer stage {stage}": (
            lambda: _floats(4, 8),
            lambda t, stage=stage: _zero(t, stage),
        )
        for stage in (1, 2, 3)
    },
    "ColumnParallelLinear": (lambda: _floats(4, 8), of_layer(lambda: ColumnParallelLinear(8, 6))),
    "RowParallelLinear": (lambda: _floats(4, 8), of_layer(lambda: RowParallelLinear(8, 6))),
    "ParallelMLP": (lambda: _floats(4, 8), of_layer(lambda: ParallelMLP(8, 16))),
    "ParallelAttention": (lambda: _floats(2, 3, 8), of_layer(lambda: ParallelAttention(8, 2))),
    "LayerNorm": (lambda: _floats(4, 8), of_layer(lambda: LayerNorm(8))),
    "RMSNorm": (lambda: _floats(4, 8), of_layer(lambda: RMSNorm(8))),
    "VocabParallelEmbedding": (_words, of_layer(lambda: VocabParallelEmbedding(8, 4))),
    "vocab_parallel_cross_entropy logits": (
        lambda: _floats(2, 3, 8),
        lambda t: vocab_parallel_cross_entropy(t, _words()),
    ),
    "vocab_parallel_cross_entropy targets": (
        _words,
        lambda t: vocab_parallel_cross_entropy(_floats(2, 3, 8), t),
    ),
    "linear_cross_entropy hidden": (
        lambda: _floats(2, 3, 8),
        lambda t: linear_cross_entropy(t, _floats(9, 8), _words()),
    ),
    "linear_cross_entropy weight": (
        lambda: _floats(9, 8),
        lambda t: linear_cross_entropy(_floats(2, 3, 8), t, _words()),
    ),
    "linear_cross_entropy bias": (
        lambda: _floats(9),
        lambda t: linear_cross_entropy(_floats(2, 3, 8), _floats(9, 8), _words(), bias=t),
    ),
    "linear_cross_entropy targets": (
        _words,
        lambda t: linear_cross_entropy(_floats(2, 3, 8), _floats(9, 8), t),
    ),
    "grad_norm, clip_grad_norm_": (lambda: _floats(4, 8), _clipped),
    "recompute.checkpoint": (lambda: _floats(4, 8), _recomputed),
    **ROOMS,
}


# What is not ours to answer: (callable, odd tensor) -> why.
TORCHS = "its own product, lookup or sum reads the tensor, as in torch.nn"
SCALED = "scaled in place, as torch's clip_grad_norm_ does: shared elements twice"
EXCUSED = {
    **{
        (f"ZeroOptimizer stage {stage}", "meta"): "a model on meta is made, by reset_parameters()"
        for stage in (1, 2, 3)
    },
    **{
        (name, "too short"): TORCHS
        for name in (
            "ColumnParallelLinear",
            "RowParallelLinear",
            "ParallelMLP",
            "ParallelAttention",
            "VocabParallelEmbedding",
            "recompute.checkpoint",
        )
    },
    **{("Pipeline between stages", odd): TORCHS for odd in WITHOUT_MEMORY},
    **{("hub.load", odd): "no file holds it" for odd in WITHOUT_MEMORY},
    **{
        (name, "overlapping"): SCALED
        for name in ("grad_norm, clip_grad_norm_", "Pipeline.clip_grad_norm_")
    },
}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, list | tuple) else []


def problem(
    name: str, odd: str, *, calls: Mapping[str, tuple[Callable[[], Tensor], Call]] = CALLS
) -> str | None:
    """What is wrong with the answer to an odd tensor, or None."""
    make, call = calls[name]
    torch.manual_seed(7)
    try:
        t = ODD[odd](make())
        plain = (
            None
            if t.is_meta or odd in WITHOUT_MEMORY
            else resolved_view(t.detach().to_dense()).clone(memory_format=torch.contiguous_format)
        )
    except (RuntimeError, TypeError, NotImplementedError):
        return None  # torch makes no such tensor
    before = bits_of(t)
    try:
        out = call(t)
    except REFUSALS as error:
        if len(str(error)) < 20:
            return f"says only {error!r}"
        after = bits_of(t)
        if before is not None and (after is None or not torch.equal(before, after)):
            return f"changed its argument and raised {error}"
        return None
    if odd in WITHOUT_MEMORY and t.numel():
        return "ran on memory that is not there"
    given = tensors_in(out)
    if t.is_meta:
        return None if all(g.is_meta for g in given) else "made numbers of none"
    assert plain is not None
    torch.manual_seed(7)
    try:
        expected = tensors_in(call(plain))
        for a, e in zip(given, expected, strict=True):
            a, e = (
                resolved_view(x.detach().to_dense() if x.layout != torch.strided else x.detach())
                for x in (a, e)
            )
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6, equal_nan=True)
    except REFUSALS as error:
        return f"ran where it raises for an ordinary copy: {error}"
    except AssertionError as error:
        return f"differs from an ordinary copy: {' '.join(str(error).split())[:200]}"
    return None


def cases(which: str) -> list[tuple[str, str]]:
    """All pairs of a callable and an odd tensor; or of each a third, dealt out so that neighbors
    have others and each odd tensor is met by a third of the callables."""
    step = {"all": 1, "dealt": 3}[which]
    return [
        (name, odd)
        for number, name in enumerate(CALLS)
        for odd in list(ODD)[number % step :: step]
        if (name, odd) not in EXCUSED
    ]


if __name__ == "__main__":
    assert pyops.__version__
    go_through(cases(sys.argv[1]), problem, int(sys.argv[2]))
