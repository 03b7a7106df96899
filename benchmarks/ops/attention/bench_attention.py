"""pyops.ops.attention beside torch's scaled_dot_product_attention: plain, causal, with dropout,
with a bias that is learned, over packed documents, of one head; and what 16-bit gradients are off
by.

Every case is B = 1, heads of 64. torch has q, k and v as it likes them, [B, H, T, K] without gaps;
pyops as [B, T, H, K].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from pyops.ops.attention import AttentionDropout, AttentionMask, attention
from pyops.ops.layers.dropout import dropout_state

__all__ = ["Work", "attention_case", "cases", "documents_of", "run", "torch_attention"]

WIDTH = 64  # of a head
FP32, BF16 = torch.float32, torch.bfloat16
P = 0.1
Step = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Work:
    """One line of the bench: sizes, what pyops is told, and what torch is."""

    tokens: int
    heads: int
    dtype: torch.dtype
    device: torch.device
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `attention`; a bias that is learned as `bias`."""
    theirs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of torch's, but a bias that is learned."""
    bias: Tensor | None = None
    """[H, T, T], with a gradient."""
    backward: bool = True
    width: int = WIDTH
    """Of a head."""


def inputs(work: Work) -> list[Tensor]:
    """q, k and v as [1, T, H, K], and dy."""
    generator = torch.Generator().manual_seed(work.tokens)
    shape = (1, work.tokens, work.heads, work.width)
    return [torch.randn(shape, generator=generator).to(work.device, work.dtype) for _ in range(4)]


def step(call: Callable[..., Tensor], leaves: list[Tensor], dy: Tensor | None) -> list[Tensor]:
    """y, and where there is a dy the gradients."""
    if dy is None:
        with torch.no_grad():
            return [call(*leaves)]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def our_step(work: Work) -> Step:
    """Forward, and backward where it is asked for, by pyops."""
    q, k, v, dy = inputs(work)
    leaves = [x.requires_grad_(work.backward) for x in (q, k, v)]
    if work.bias is not None:
        leaves.append(work.bias.detach().clone().requires_grad_(work.backward))

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return attention(q, k, v, bias=bias, **work.ours)

    return partial(step, call, leaves, dy if work.backward else None)


def torch_attention(work: Work, function: Callable[..., Tensor] | None = None) -> Step:
    """The same by torch, or by a function of q, k and v [1, H, T, K]."""
    heads_first = [x.transpose(1, 2).contiguous() for x in inputs(work)]
    leaves = [x.requires_grad_(work.backward) for x in heads_first[:3]]
    if work.bias is not None:
        leaves.append(work.bias.detach().clone()[None].requires_grad_(work.backward))

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        if function is not None:
            return function(q, k, v)
        given = dict(work.theirs) if bias is None else {**work.theirs, "attn_mask": bias}
        return functional.scaled_dot_product_attention(q, k, v, **given)

    return partial(step, call, leaves, heads_first[3] if work.backward else None)


def of_torch(found: list[Tensor]) -> list[Tensor]:
    """torch's results in our order of dimensions."""
    return [x.transpose(1, 2) for x in found[:4]] + [x[0] for x in found[4:]]


def difference(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> float:
    """The largest difference, relative to the norm of what is expected; raises when it is too large
    or something is nothing."""
    bound = 2e-6 if dtype == FP32 else 2e-2
    errors = []
    for ours, theirs in zip(found, expected, strict=True):
        norm = float(theirs.float().norm())
        if not norm:
            raise AssertionError("the rival's result is zero throughout")
        errors.append(float((ours.float() - theirs.float()).norm()) / norm)
    if not max(errors) <= bound:
        raise AssertionError(f"differs from torch by {errors}, relative to the norm")
    return max(errors)


def agree(ours: Step, theirs: Step, dtype: torch.dtype) -> float:
    """The largest difference of two implementations."""
    return difference(ours(), of_torch(theirs()), dtype)


def check_dropout(work: Work) -> float:
    """With the weights that are dropped: as explicit scores give it, for two of the heads."""
    dropout = work.ours["dropout"]
    q, k, v, dy = (x[:, :, 2:4] for x in inputs(work))
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    part = AttentionDropout(dropout.p, dropout.state, first_head=2, num_heads=work.heads)
    found = step(lambda *x: attention(*x, mask=work.ours["mask"], dropout=part), leaves, dy)
    whole = our_step(work)()
    pieces = [x[:, :, 2:4] for x in whole]
    if not all(torch.equal(a, b) for a, b in zip(found, pieces, strict=True)):
        raise AssertionError("heads 2 and 3 alone are not those of the whole")
    ones = torch.ones_like(v).requires_grad_()
    kept = attention(q, k, ones, mask=work.ours["mask"], dropout=part).detach().float()
    # A row of weights that are kept sums to 1 in the mean
    if not abs(float(kept.mean()) - 1) < 0.01 or bool((kept == 1).all()):
        raise AssertionError(f"weights that are kept sum to {float(kept.mean())}")
    return abs(float(kept.mean()) - 1)


def attention_case(
    name: str,
    work: Work,
    *,
    bench: str = "attention",
    target: float | None = None,
    rivals: Mapping[str, Callable[[], Step]] | None = None,
    **more: Any,
) -> Case:
    """Ours beside torch's; a rival of `rivals` is made when the case is."""
    ours, theirs = our_step(work), torch_attention(work)
    drops = "dropout" in work.ours

    def check() -> float:
        if drops:
            return check_dropout(work)
        return agree(ours, theirs, work.dtype)

    calls: dict[str, Callable[[], object]] = {"pyops": ours, "torch SDPA": theirs}
    vet: dict[str, Callable[[], object]] = {}
    for rival, make in (rivals or {}).items():
        other = make()
        calls[rival] = other
        vet[rival] = partial(agree, ours, other, work.dtype)
    targets = {"torch SDPA": target} if target else {}
    return Case(
        bench,
        name,
        calls,
        check=check,
        device=work.device,
        vet=vet,
        **{"targets": targets, **more},
    )


def documents_of(count: int, tokens: int, device: torch.device) -> Tensor:
    """int32 [1, T]: documents of a length that grows from the first to the last, threefold."""
    weights = torch.linspace(1, 3, count).cumsum(0)
    ends = (weights / weights[-1] * tokens).round().long()
    return torch.searchsorted(ends, torch.arange(tokens), right=True).int()[None].to(device)


def gradient_errors(work: Work) -> dict[str, Any]:
    """How far dk and dv are off in 16 bits: ours and torch's, beside explicit weights and their
    gradient rounded once to 16 bits, with sums in float32."""
    q, k, v, dy = (x.detach()[0, :, 0] for x in inputs(work))
    later = torch.ones(work.tokens, work.tokens, dtype=torch.bool, device=q.device).triu(1)
    later &= bool(work.theirs.get("is_causal"))

    def explicit(wide: torch.dtype, rounded: bool) -> list[Tensor]:
        a, b, c, d = (x.to(wide) for x in (q, k, v, dy))
        weights = (a @ b.t() * work.width**-0.5).masked_fill(later, -torch.inf).softmax(-1)
        dp = d @ c.t()
        ds = weights * (dp - (weights * dp).sum(-1, keepdim=True))
        if rounded:
            ds, weights = (x.to(work.dtype).to(wide) for x in (ds, weights))
        found = [ds.t() @ a * work.width**-0.5, weights.t() @ d]
        return [x.to(work.dtype) if rounded else x for x in found]

    exact = explicit(torch.float64, rounded=False)
    each = {
        "ours": [x[0, :, 0] for x in our_step(work)()[2:4]],
        "torch": [x[0, 0] for x in torch_attention(work)()[2:4]],
        "one rounding": explicit(torch.float32, rounded=True),
    }

    def worst(found: list[Tensor]) -> float:
        return max(
            float((x.double() - e).norm() / e.norm()) for x, e in zip(found, exact, strict=True)
        )

    errors = {name: worst(found) for name, found in each.items()}
    once = errors["one rounding"]
    return {
        "gradient_errors": {name: float(f"{x:.3g}") for name, x in errors.items()},
        "error_beside_one_rounding": round(errors["ours"] / once, 3),
        "torchs_error_beside_one_rounding": round(errors["torch"] / once, 3),
    }


def works(device: torch.device) -> Iterator[tuple[str, Work, float | None]]:
    """Name, work and how many times faster than torch it ought to be."""
    cuda = device.type == "cuda"
    causal = {"mask": AttentionMask(causal=True)}
    theirs = {"is_causal": True}
    long = 8192 if cuda else 2048
    for dtype in (FP32, BF16):
        short = str(dtype).removeprefix("torch.")

        def of(
            tokens: int,
            ours: Mapping[str, Any],
            theirs: Mapping[str, Any],
            dtype: torch.dtype = dtype,
        ) -> Work:
            return Work(tokens, 8, dtype, device, ours, theirs)

        for tokens in (512, 1024, 2048, 4096):
            aim = (1.25 if tokens <= 1024 else 1.0) if dtype == FP32 and not cuda else None
            aim = 0.9 if cuda and dtype == BF16 else aim
            yield f"causal {short}, T = {tokens}", of(tokens, causal, theirs), aim
        yield f"everything seen {short}, T = {long}", of(long, {}, {}), None
        state = dropout_state(0x5EED, 0, device=device)
        drops = {**causal, "dropout": AttentionDropout(P, state)}
        work = of(long, drops, {**theirs, "dropout_p": P})
        yield f"causal, dropout {P} {short}, T = {long}", work, None if cuda else 5.0
        bias = torch.randn(8, long, long, device=device).to(dtype)
        aim = 3.0 if cuda or dtype == BF16 else 1.8
        yield f"bias with gradient {short}, T = {long}", replace(of(long, {}, {}), bias=bias), aim
        for tokens in (long, 2 * long):
            ids = documents_of(8, tokens, device)
            same = (ids[0][:, None] == ids[0]).tril()
            packed = {"mask": AttentionMask(causal=True, documents=ids)}
            work = of(tokens, packed, {"attn_mask": same})
            yield f"8 packed documents {short}, T = {tokens}", work, 6.0
        one = replace(of(long, causal, theirs), heads=1)
        yield f"causal, one head {short}, T = {long}", one, 1.5 if dtype == FP32 else None


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    for name, work, aim in works(device):
        whole = f"{name}, forward + backward"
        yield whole, partial(attention_case, whole, work, target=aim)
    for tokens in (2048, 8192):
        name = f"error of gradients bfloat16, one head, T = {tokens}"
        work = Work(
            tokens, 1, BF16, device, {"mask": AttentionMask(causal=True)}, {"is_causal": True}
        )
        yield name, partial(error_case, name, work)


def error_case(name: str, work: Work) -> Case:
    """Judged by the errors; the times stand beside them."""
    return attention_case(
        name, work, facts=gradient_errors(work), most={"error_beside_one_rounding": 1.1}
    )


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`; a call takes up to seconds on a CPU."""
    chosen = [make for name, make in cases(options.device) if (options.only or "") in name]
    return run_cases(chosen, rounds=min(options.rounds, 7))
