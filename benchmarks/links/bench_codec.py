"""The kernels of the codecs: one-bit and eight-bit, encode with and without error feedback, decode,
sum of rows, server's step.

Each against the same result in separate torch operations, and against a copy of as many bytes on
the same device. Before anything is timed, payload, errors and numbers are compared with the
plain-torch definition, bit for bit.
On a GPU one-bit and int8 aim at 85 % of a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from pyops.ops.communication import onebit, quantize

__all__ = ["cases", "run"]

MI = 1 << 20
ROWS = 4


def same(
    calls: tuple[Callable[[], object], Callable[[], object]],
    results: tuple[list[Tensor], list[Tensor]],
) -> Callable[[], float]:
    """A check that the op and its definition leave the same bits, and that they wrote something."""

    def check() -> float:
        for call, written in zip(calls, results, strict=True):
            before = [t.clone() for t in written]
            call()
            if any(torch.equal(a, b) for a, b in zip(before, written, strict=True)):
                raise AssertionError("the op wrote nothing")
        for ours, defined in zip(*results, strict=True):
            if not torch.equal(ours.view(torch.uint8), defined.view(torch.uint8)):
                raise AssertionError(
                    f"{int((ours != defined).sum())} of {ours.numel()} elements differ "
                    "from the definition"
                )
        return 0.0

    return check


def pack(positive: Tensor, weights: Tensor) -> Tensor:
    """Eight signs to a byte."""
    return (positive.view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)


def unpack(bits: Tensor, shifts: Tensor) -> Tensor:
    """+1 and -1 of the bits."""
    return ((bits.unsqueeze(1) >> shifts) & 1).view(-1).float().mul_(2).sub_(1)


class Torch:
    """Rivals: what one writes with torch's operations. Sizes are multiples of the block."""

    def __init__(self, device: torch.device) -> None:
        self.shifts = torch.arange(8, dtype=torch.uint8, device=device)
        self.weights = torch.ones(8, dtype=torch.uint8, device=device) << self.shifts

    def onebit_encode(self, x: Tensor, error: Tensor | None) -> tuple[Tensor, Tensor]:
        u = (x + error if error is not None else x).view(-1, onebit.BLOCK)
        scales = u.abs().mean(1, keepdim=True)
        positive = u >= 0
        if error is not None:
            torch.sub(u, torch.where(positive, scales, -scales), out=error.view(u.shape))
        return scales, pack(positive.view(-1), self.weights)

    def onebit_sum(self, rows: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
        total = None
        for scales, bits in rows:
            value = unpack(bits, self.shifts).view(-1, onebit.BLOCK).mul_(scales)
            total = value if total is None else total.add_(value)
        assert total is not None
        return total.mul_(scale).view(-1)

    def quantize_encode(
        self, x: Tensor, error: Tensor | None, format: str
    ) -> tuple[Tensor, Tensor]:
        u = (x + error if error is not None else x).view(-1, quantize.BLOCK)
        limit, dtype = {
            "int8": (127.0, torch.int8),
            "e4m3": (448.0, torch.float8_e4m3fn),
            "e5m2": (57344.0, torch.float8_e5m2),
        }[format]
        scales = u.abs().amax(1, keepdim=True).div_(limit)
        t = (u / scales).clamp_(-limit, limit)
        codes = (t.round_() if format == "int8" else t).to(dtype)
        if error is not None:
            torch.sub(u, codes.float().mul_(scales), out=error.view(u.shape))
        return scales, codes

    def quantize_sum(self, rows: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
        total = None
        for scales, codes in rows:
            value = codes.float().mul_(scales)
            total = value if total is None else total.add_(value)
        assert total is not None
        return total.mul_(scale).view(-1)


class Bench:
    """Operands of one family of ops ("onebit" or a format of quantize), made when a case is."""

    def __init__(self, kind: str, n: int, device: torch.device) -> None:
        self.kind, self.n, self.device = kind, n, device
        self.stem = "onebit" if kind == "onebit" else "quantize"
        self.module: Any = onebit if kind == "onebit" else quantize
        self.name: dict[str, Any] = {"rule": "l1"} if kind == "onebit" else {"format": kind}
        self.decoding: dict[str, Any] = {} if kind == "onebit" else {"format": kind}
        self.body = (
            1 / 8 + 4 / onebit.BLOCK if kind == "onebit" else 1 + 4 / quantize.BLOCK
        )  # bytes per element
        self.rival = Torch(device)

    def numbers(self) -> Tensor:
        return torch.randn(self.n, device=self.device)

    def payloads(self, count: int) -> list[Tensor]:
        out = [
            torch.zeros(self.module.payload_bytes(self.n), dtype=torch.uint8, device=self.device)
            for _ in range(count)
        ]
        for payload in out:
            self.op("encode")(payload, self.numbers(), **self.name)
        return out

    def op(self, what: str, end: str = "") -> Callable[..., None]:
        return getattr(self.module, f"{self.stem}_{what}_{end}")

    def torch_encode(self, x: Tensor, error: Tensor | None) -> tuple[Tensor, Tensor]:
        return (
            self.rival.onebit_encode(x, error)
            if self.kind == "onebit"
            else self.rival.quantize_encode(x, error, self.kind)
        )

    def torch_sum(self, rows: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
        return (
            self.rival.onebit_sum(rows, scale)
            if self.kind == "onebit"
            else self.rival.quantize_sum(rows, scale)
        )

    def case(
        self,
        name: str,
        ours: Callable[[], object],
        theirs: Callable[[], object],
        check: Callable[[], float],
        per: float,
        target: float | None = None,
    ) -> Case:
        return Case(
            "codec",
            name,
            {"pyops": ours, "torch": theirs},
            check=check,
            device=self.device,
            bytes_moved=round(per * self.n),
            targets={"torch": target} if target else {},
            least={"percent_of_copy": 85.0}
            if self.device.type == "cuda" and self.kind in ("onebit", "int8")
            else {},
        )

    def encode(self, name: str, *, feedback: bool) -> Case:
        x, start = self.numbers(), self.numbers()
        errors = [start.clone() if feedback else None for _ in range(3)]
        payloads = [
            torch.zeros(self.module.payload_bytes(self.n), dtype=torch.uint8, device=self.device)
            for _ in range(2)
        ]
        calls = [
            partial(self.op("encode", end), payload, x, error, **self.name)
            for end, payload, error in zip(("", "reference"), payloads, errors, strict=False)
        ]
        results = [
            [payload, *([error] if error is not None else [])]
            for payload, error in zip(payloads, errors, strict=False)
        ]
        check = same((calls[0], calls[1]), (results[0], results[1]))
        per = 4 + self.body + (8 if feedback else 0)
        return self.case(
            name,
            calls[0],
            lambda: self.torch_encode(x, errors[2]),
            check,
            per,
            5.0 if feedback and self.kind == "onebit" else None,
        )

    def decode(self, name: str) -> Case:
        payload = self.payloads(1)[0]
        outs = [torch.zeros(self.n, device=self.device) for _ in range(2)]
        calls = [
            partial(self.op("decode", end), out, payload, **self.decoding)
            for end, out in zip(("", "reference"), outs, strict=True)
        ]
        row = self.torch_encode(self.numbers(), None)
        return self.case(
            name,
            calls[0],
            lambda: self.torch_sum([row], 1.0),
            same((calls[0], calls[1]), ([outs[0]], [outs[1]])),
            4 + self.body,
        )

    def sum_rows(self, name: str) -> Case:
        payloads, outs = (
            self.payloads(ROWS),
            [torch.zeros(self.n, device=self.device) for _ in range(2)],
        )
        calls = [
            partial(self.op("sum_rows", end), out, payloads, scale=0.25, **self.decoding)
            for end, out in zip(("", "reference"), outs, strict=True)
        ]
        rows = [self.torch_encode(self.numbers(), None) for _ in range(ROWS)]
        check = same((calls[0], calls[1]), ([outs[0]], [outs[1]]))
        return self.case(
            name, calls[0], lambda: self.torch_sum(rows, 0.25), check, 4 + ROWS * self.body
        )

    def reencode(self, name: str) -> Case:
        payloads, start = self.payloads(ROWS), self.numbers()
        errors, outs = (
            [start.clone() for _ in range(3)],
            [torch.zeros_like(payloads[0]) for _ in range(2)],
        )
        calls = [
            partial(
                self.op("reencode", end), out, payloads, error, n=self.n, scale=0.25, **self.name
            )
            for end, out, error in zip(("", "reference"), outs, errors, strict=False)
        ]
        rows = [self.torch_encode(self.numbers(), None) for _ in range(ROWS)]
        check = same((calls[0], calls[1]), ([outs[0], errors[0]], [outs[1], errors[1]]))
        return self.case(
            name,
            calls[0],
            lambda: self.torch_encode(self.torch_sum(rows, 0.25), errors[2]),
            check,
            8 + (ROWS + 1) * self.body,
        )


def _make(
    make: Callable[[Bench, str], Case], kind: str, n: int, device: torch.device, name: str
) -> Case:
    return make(Bench(kind, n, device), name)


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each; on a GPU large enough to be beyond its caches."""
    n = (256 if device.type == "cuda" else 16) * MI
    for kind in ("onebit", *quantize.FORMATS):
        for what, make in (
            ("encode with error feedback", partial(Bench.encode, feedback=True)),
            ("encode", partial(Bench.encode, feedback=False)),
            ("decode", Bench.decode),
            (f"sum of {ROWS} rows", Bench.sum_rows),
            (f"server's step, {ROWS} rows", Bench.reencode),
        ):
            name = f"{kind} {what}, {n // MI} Mi"
            yield name, partial(_make, make, kind, n, device, name)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    return run_cases(
        [make for name, make in cases(options.device) if (options.only or "") in name],
        rounds=options.rounds,
    )
