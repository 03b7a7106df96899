"""LAMB, LARS and Adafactor over the tensors of a GPT, against torch's foreach operations with the
same semantics.

    LAMB, LARS  torch has none: the same formula in torch._foreach_*, no host synchronisation either
    Adafactor   torch.optim.Adafactor(foreach=True); on the CPU alone, where it has a kernel

Bytes: LAMB 40 per element in two passes, LARS 28, Adafactor 24 in three. On a GPU LAMB aims at 90 %
of a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.instruments.rivals import of_lamb
from benchmarks.instruments.trace import launched
from benchmarks.ops.optimizers.parameter_lists import Step, compare, twins
from pyops.flat import FlatBuffer
from pyops.optim import LAMB, LARS, Adafactor

__all__ = ["cases", "run"]

LAMB_HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
LARS_HYPER: dict[str, Any] = {
    "lr": 0.5,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "trust_coefficient": 1e-2,
    "eps": 1e-8,
}


def gpt(width: int, blocks: int, vocabulary: int, *, device: torch.device) -> list[nn.Parameter]:
    """The tensors of a GPT: embeddings, and twelve per block."""
    block = [
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        (4 * width, width),
        (4 * width,),
        (width, 4 * width),
    ]
    block += [(width,)] * 5
    shapes = [(vocabulary, width), (256, width), *block * blocks, (width,), (width,)]
    generator = torch.Generator(device=device).manual_seed(1)
    params = [
        nn.Parameter(torch.randn(s, generator=generator, device=device) * 0.02 + 0.1)
        for s in shapes
    ]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, device=device) * 0.01
    return params


def foreach_lamb(
    params: list[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Step:
    """LAMB by torch._foreach_*: the same formula, every norm a tensor."""
    ps: list[Tensor] = [p.detach() for p in params]
    ms, vs = ([torch.zeros_like(p) for p in ps] for _ in range(2))
    count = [0]

    def step() -> None:
        grads = [p.grad for p in params if p.grad is not None]
        count[0] += 1
        bc1, bc2 = 1 - betas[0] ** count[0], 1 - betas[1] ** count[0]
        torch._foreach_lerp_(ms, grads, 1 - betas[0])
        torch._foreach_mul_(vs, betas[1])
        torch._foreach_addcmul_(vs, grads, grads, 1 - betas[1])
        us = torch._foreach_sqrt(vs)
        torch._foreach_div_(us, bc2**0.5)
        torch._foreach_add_(us, eps)
        torch._foreach_mul_(us, bc1)
        us = torch._foreach_div(ms, us)
        torch._foreach_add_(us, ps, alpha=weight_decay)
        of_p, of_u = torch.stack(torch._foreach_norm(ps)), torch.stack(torch._foreach_norm(us))
        rates = torch.where((of_p > 0) & (of_u > 0), of_p / of_u, 1.0) * -lr
        torch._foreach_mul_(us, list(rates.unbind()))
        torch._foreach_add_(ps, us)

    return step


def foreach_lars(
    params: list[nn.Parameter],
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    trust_coefficient: float,
    eps: float,
) -> Step:
    """LARS by torch._foreach_*."""
    ps: list[Tensor] = [p.detach() for p in params]
    buffers = [torch.zeros_like(p) for p in ps]

    def step() -> None:
        grads = [p.grad for p in params if p.grad is not None]
        of_p, of_g = torch.stack(torch._foreach_norm(ps)), torch.stack(torch._foreach_norm(grads))
        rates = trust_coefficient * of_p / (of_g + weight_decay * of_p + eps)
        rates = torch.where((of_p > 0) & (of_g > 0), rates, 1.0)
        scaled = torch._foreach_add(grads, ps, alpha=weight_decay)
        torch._foreach_mul_(scaled, list(rates.unbind()))
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, scaled)
        torch._foreach_add_(ps, buffers, alpha=-lr)

    return step


def flat(params: list[nn.Parameter]) -> nn.Parameter:
    """The same in one flat parameter, gradients too."""
    return FlatBuffer([(str(i), p) for i, p in enumerate(twins(params))]).parameter


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    on_cpu = device.type == "cpu"
    width, blocks, vocabulary = (
        (512, 4, 8192) if on_cpu else (1024, 8, 32768)
    )  # 16.9 Mi and 134 Mi elements

    def case(
        name: str,
        ours: Any,
        rival: str,
        theirs: Callable[[list[nn.Parameter]], Step],
        hyper: Any,
        each: int,
        target: float,
    ) -> Case:
        params = gpt(width, blocks, vocabulary, device=device)
        twin = twins(params)
        mine, other, together = ours(params, **hyper), theirs(twin), ours([flat(params)], **hyper)
        lamb = ours is LAMB and not on_cpu
        more = of_lamb(lambda: twins(params), hyper) if lamb else {}
        return Case(
            "layerwise",
            name,
            {"pyops": mine.step, rival: other, "pyops, flat": together.step, **more},
            device=device,
            check=lambda: compare(params, twin, mine.step, other, relative=1e-4),
            bytes_moved=each * sum(p.numel() for p in params),
            targets={rival: target if on_cpu else 1.0},
            least={"percent_of_copy": 90.0} if lamb else {},
            observe=launched(mine.step, device),
        )

    size = "16 Mi in the tensors of a GPT" if on_cpu else "128 Mi in the tensors of a GPT"
    names = [f"{kind} fp32, {size}" for kind in ("LAMB", "LARS", "Adafactor")]
    yield (
        names[0],
        lambda: case(
            names[0],
            LAMB,
            "torch foreach",
            lambda ps: foreach_lamb(ps, **LAMB_HYPER),
            LAMB_HYPER,
            40,
            1.5,
        ),
    )
    yield (
        names[1],
        lambda: case(
            names[1],
            LARS,
            "torch foreach",
            lambda ps: foreach_lars(ps, **LARS_HYPER),
            LARS_HYPER,
            28,
            1.5,
        ),
    )
    if not on_cpu:  # Adafactor has no CUDA kernel yet
        return
    yield (
        names[2],
        lambda: case(
            names[2],
            Adafactor,
            "torch foreach",
            lambda ps: torch.optim.Adafactor(ps, lr=1e-2, foreach=True).step,
            {"lr": 1e-2},
            24,
            1.0,
        ),
    )


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    return run_cases(
        [make for name, make in cases(options.device) if (options.only or "") in name],
        rounds=options.rounds,
    )
