"""`tests.odd_input.callables` for pyops.offload, pyops.pipeline and pyops.hub."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pyops import checkpoint, hub
from pyops.mesh import ALONE
from pyops.models import GPT, GPTConfig
from pyops.offload import AsyncFile, Offloaded
from pyops.optim import AdamW
from pyops.pipeline import Pipeline, PipelineConfig, profile, schedule

__all__ = ["ROOMS"]

CONFIG = GPTConfig(
    vocab_size=12, sequence_length=4, num_layers=1, num_heads=2, dim=8, tied_head=False
)
NAME = "blocks.0.mlp.down.weight"  # of the model, [8, 32]
THERE = "transformer.h.0.mlp.c_proj.weight"  # of its file, [32, 8]


def _floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def linear(n: int, m: int, *, weight: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(n, m)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(_floats(*p.shape))
    if weight is not None:
        layer.weight = nn.Parameter(weight)
    return layer


# -------------------------------------------------------------------------------------------------
# offload


def _written(t: Tensor) -> Tensor:
    """Its bytes in a file. The file's room is what the tensor should have."""
    with tempfile.TemporaryDirectory() as folder:
        file = AsyncFile(folder, nbytes=4096, direct=False)
        try:
            file.write(t, offset=64).wait()
            found = torch.zeros(4, 8)
            file.read(found, offset=64).wait()
        finally:
            file.close()
        return found


def _read(t: Tensor) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        file = AsyncFile(folder, nbytes=4096, direct=False)
        try:
            file.write(torch.ones(64), offset=0).wait()
            return file.read(t, offset=64).wait().clone()
        finally:
            file.close()


def _offloaded(
    where: str, put: Callable[[Offloaded, nn.Parameter, Tensor], Any]
) -> Callable[[Tensor], Any]:
    """Two steps. put: what is done with the odd tensor before the second, and that one's arguments,
    or None."""

    def call(t: Tensor) -> list[Tensor]:
        p = nn.Parameter(_floats(4, 8))
        with tempfile.TemporaryDirectory() as folder:
            offloaded = Offloaded(AdamW([p], lr=0.1), where or folder, tile_bytes=1 << 16)
            try:
                p.grad = _floats(4, 8)
                offloaded.step()
                offloaded.step(**(put(offloaded, p, t) or {}))
                states = offloaded.read(p)
                return [
                    p.detach().clone(),
                    *(states[key].clone() for key in ("exp_avg", "exp_avg_sq")),
                ]
            finally:
                offloaded.close()

    return call


def _state(offloaded: Offloaded, p: nn.Parameter, t: Tensor) -> None:
    offloaded.write(p, {**offloaded.read(p), "exp_avg": t})


def _gradient(offloaded: Offloaded, p: nn.Parameter, t: Tensor) -> None:
    p.grad = t


def _offloaded_parameter(where: str, *, target: bool) -> Callable[[Tensor], Any]:
    def call(t: Tensor) -> list[Tensor]:
        p = nn.Parameter(_floats(4, 8) if target else t)
        with tempfile.TemporaryDirectory() as folder:
            offloaded = Offloaded(
                AdamW([p], lr=0.1), where or folder, targets={p: t} if target else None
            )
            try:
                p.grad = _floats(4, 8)
                offloaded.step()
                return [t.detach().clone() if target else p.detach().clone()]
            finally:
                offloaded.close()

    return call


# -------------------------------------------------------------------------------------------------
# pipeline


def _pipelined(kind: str, put: Callable[[dict[str, Any], Tensor], None]) -> Callable[[Tensor], Any]:
    """A step of a pipeline of two stages in this process. put: places the odd tensor among what it
    is made with."""

    def call(t: Tensor) -> list[Tensor]:
        given: dict[str, Any] = {
            "batch": _floats(4, 8),
            "target": _floats(4, 3),
            "weight": None,
            "between": None,
            "named": {},
        }
        put(given, t)
        layers = [linear(8, 8, weight=given["weight"]), Between(given["between"]), linear(8, 3)]
        made = Pipeline(
            layers,
            schedule=schedule(kind, num_stages=2, num_microbatches=2),
            group=ALONE,
            loss=nn.functional.mse_loss,
            config=PipelineConfig(boundaries=[0, 2, 3]),
        )
        try:
            loss = made.step(given["batch"], given["target"], **given["named"])
            gradients = [p.grad.clone() for p in made.parameters() if p.grad is not None]
            return [loss, *gradients, made.clip_grad_norm_(0.1)]
        finally:
            made.close()

    return call


class Between(nn.Module):
    """Ends a stage. value: is added to what it returns; beside: goes with it, unread; alone: goes
    in its place. mask: an argument of the step."""

    def __init__(
        self, value: Tensor | None, *, beside: Tensor | None = None, alone: Tensor | None = None
    ) -> None:
        super().__init__()
        self.value, self.beside, self.alone = value, beside, alone

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Any:
        if self.alone is not None:
            return self.alone
        x = torch.tanh(x) if mask is None else x * mask
        x = x if self.value is None else x + self.value
        return x if self.beside is None else (x, self.beside)


def _clipped(t: Tensor) -> list[Tensor]:
    layers = [linear(8, 8), linear(8, 3)]
    made = Pipeline(
        layers,
        schedule=schedule("gpipe", num_stages=2, num_microbatches=1),
        group=ALONE,
        loss=nn.functional.mse_loss,
    )
    try:
        layers[0].weight.grad = t
        return [
            made.clip_grad_norm_(0.1),
            *(p.grad.clone() for p in made.parameters() if p.grad is not None),
        ]
    finally:
        made.close()


def _evaluated(t: Tensor) -> Tensor:
    made = Pipeline(
        [linear(8, 8), linear(8, 3)],
        schedule=schedule("gpipe", num_stages=2, num_microbatches=2),
        group=ALONE,
    )
    try:
        found: Tensor = made(t)
        return found
    finally:
        made.close()


def _profiled(t: Tensor) -> list[Tensor]:
    """How many bytes go on and are kept; times are another each time."""
    found = profile([linear(8, 8), linear(8, 3)], t, rounds=1, warmup=0)
    return [torch.tensor([layer.activation, layer.parameters]) for layer in found.layers]


# -------------------------------------------------------------------------------------------------
# hub


def _model(t: Tensor) -> GPT:
    model = GPT(CONFIG, seed=1)
    model.get_submodule(NAME.rpartition(".")[0]).weight = nn.Parameter(t)
    return model


def _saved(t: Tensor) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        hub.save(_model(t), f"{folder}/m")
        return load_file(f"{folder}/m/model.safetensors")[THERE].clone()


def _loaded(t: Tensor) -> Tensor:
    """As a tensor of a file, which can hold some of them."""
    with tempfile.TemporaryDirectory() as folder:
        hub.save(GPT(CONFIG, seed=1), f"{folder}/m")
        tensors = load_file(f"{folder}/m/model.safetensors")
        save_file(
            {**tensors, THERE: t.detach().clone(memory_format=torch.contiguous_format)},
            f"{folder}/m/model.safetensors",
        )
        return hub.load(f"{folder}/m").get_parameter(NAME).detach().clone()


def _exported(t: Tensor) -> Tensor:
    """Of a checkpoint's state."""
    with tempfile.TemporaryDirectory() as folder:
        hub.save(GPT(CONFIG, seed=1), f"{folder}/m")
        hub.to_checkpoint(f"{folder}/m", f"{folder}/c")
        state = checkpoint.load(f"{folder}/c")[0]
        state["model"][NAME] = t
        checkpoint.save(f"{folder}/other", state)
        hub.from_checkpoint(f"{folder}/other", f"{folder}/again")
        return load_file(f"{folder}/again/model.safetensors")[THERE].clone()


ROOMS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Any]]] = {
    "AsyncFile.write": (lambda: _floats(4, 8), _written),
    "AsyncFile.read": (lambda: _floats(4, 8), _read),
    **{
        f"Offloaded {what}, {where or 'disk'}": (lambda: _floats(4, 8), call)
        for where in ("", "cpu")
        for what, call in {
            "parameter": _offloaded_parameter(where, target=False),
            "target": _offloaded_parameter(where, target=True),
            "gradient": _offloaded(where, _gradient),
            "state": _offloaded(where, _state),
        }.items()
    },
    "Offloaded gradients=": (
        lambda: _floats(4, 8),
        _offloaded("", lambda _, p, t: {"gradients": {p: t}}),
    ),
    "Offloaded factor": (lambda: torch.tensor(0.5), _offloaded("", lambda _, p, t: {"factor": t})),
    "Pipeline batch": (
        lambda: _floats(4, 8),
        _pipelined("1f1b", lambda given, t: given.update(batch=t)),
    ),
    "Pipeline target": (
        lambda: _floats(4, 3),
        _pipelined("1f1b", lambda given, t: given.update(target=t)),
    ),
    "Pipeline named": (
        lambda: _floats(4, 8),
        _pipelined("1f1b", lambda given, t: given.update(named={"mask": t})),
    ),
    "Pipeline parameter": (
        lambda: _floats(8, 8),
        _pipelined("1f1b", lambda given, t: given.update(weight=t)),
    ),
    "Pipeline parameter, split": (
        lambda: _floats(8, 8),
        _pipelined("zb1p", lambda given, t: given.update(weight=t)),
    ),
    "Pipeline between stages": (
        lambda: _floats(2, 8),
        _pipelined("gpipe", lambda given, t: given.update(between=t)),
    ),
    "Pipeline.clip_grad_norm_": (lambda: _floats(8, 8), _clipped),
    "Pipeline.forward": (lambda: _floats(4, 8), _evaluated),
    "profile": (lambda: _floats(4, 8), _profiled),
    "hub.save": (lambda: _floats(8, 32), _saved),
    "hub.load": (lambda: _floats(32, 8), _loaded),
    "hub.from_checkpoint": (lambda: _floats(8, 32), _exported),
}
