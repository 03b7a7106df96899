"""Pruning: the k-th largest magnitude beside torch.kthvalue and topk, a mask applied in place,
what masks cost in a step, and how many held-out digits pruned networks read.

`bytes`: what has to be read, twice for the k-th largest; read and written for a mask.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.__main__ import Options
from benchmarks.compress import pruned_digits as runs
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.training.bench_convergence import stamp
from pyops.ops.sparse.radix_count import (
    BINS,
    keep_bits_,
    keep_bits_reference,
    kth_magnitude,
    radix_count_,
)
from pyops.optim import AdamW
from pyops.pruning import LotteryConfig, hold, lottery, magnitude

__all__ = ["cases", "run"]

SIZES = (1 << 20, 1 << 26)
SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98)
SEEDS = range(5)


def kth(name: str, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The threshold of a sparsity of 0.9."""
    x = torch.randn(n, device=device).to(dtype)
    k = n // 10

    def by_kthvalue() -> Tensor:
        return torch.kthvalue(x.abs(), n - k + 1).values

    def by_topk() -> Tensor:
        return torch.topk(x.abs(), k, sorted=False).values.min()

    def check() -> float:
        assert kth_magnitude([x], k).value == float(by_kthvalue())
        return 0.0

    return Case(
        "pruning",
        name,
        {
            "pyops": lambda: kth_magnitude([x], k),
            "torch.kthvalue": by_kthvalue,
            "torch.topk": by_topk,
        },
        check=check,
        device=device,
        bytes_moved=2 * n * dtype.itemsize,
        targets={"torch.kthvalue": 8.0} if n == SIZES[-1] and dtype == torch.float32 else {},
    )


def a_pass(name: str, n: int, lower: bool, device: torch.device) -> Case:
    """One of the two passes."""
    x, counts = torch.randn(n, device=device), torch.zeros(BINS, dtype=torch.int64, device=device)
    prefix = kth_magnitude([x], n // 10).pattern >> 16 if lower else None

    def check() -> float:
        counts.zero_()
        radix_count_([x], counts, prefix=prefix)
        found = int(counts.sum())
        patterns = x.abs().view(torch.int32) >> 16
        assert found == (n if prefix is None else int((patterns == prefix).sum()))
        return 0.0

    return Case(
        "pruning",
        name,
        {"pyops": lambda: radix_count_([x], counts, prefix=prefix)},
        check=check,
        device=device,
        bytes_moved=n * x.itemsize,
    )


def masked(name: str, n: int, device: torch.device) -> Case:
    """A mask of 0.9 applied to a gradient, in place."""
    x = torch.randn(n, device=device)
    bits = torch.randint(0, 256, (n // 8,), dtype=torch.uint8, device=device)
    bits &= torch.randint(0, 256, (n // 8,), dtype=torch.uint8, device=device)
    bits &= torch.randint(0, 256, (n // 8,), dtype=torch.uint8, device=device)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    floats = ((bits[:, None] >> places) & 1).view(-1).float()

    def check() -> float:
        ours, plain = x.clone(), x.clone()
        keep_bits_([ours], [bits])
        keep_bits_reference([plain], [bits])
        assert ours.equal(plain)
        return 0.0

    return Case(
        "pruning",
        name,
        {"pyops": lambda: keep_bits_([x], [bits]), "torch, mask of floats": lambda: x.mul_(floats)},
        check=check,
        device=device,
        bytes_moved=2 * n * x.itemsize + n // 8,
    )


def step(name: str, device: torch.device) -> Case:
    """A step of AdamW with the masks held, and without."""
    torch.manual_seed(0)
    nets = [nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).to(device) for _ in range(2)]
    x = torch.randn(256, 1024, device=device)
    adams = [AdamW(net.parameters(), lr=1e-4) for net in nets]
    hold(magnitude(nets[0], 0.9, only=["*.weight"]), adams[0])
    nets[1].load_state_dict(nets[0].state_dict())

    def one(net: nn.Module, adam: AdamW) -> None:
        adam.zero_grad()
        net(x).square().mean().backward()
        adam.step()

    def check() -> float:
        one(nets[0], adams[0])
        weight: Tensor = nets[0][0].weight  # type: ignore[assignment,index]
        assert float(torch.eq(weight, 0).float().mean()) >= 0.899
        return 0.0

    return Case(
        "pruning",
        name,
        {
            "pyops": partial(one, nets[0], adams[0]),
            "dense": partial(one, nets[1], adams[1]),
        },
        check=check,
        device=device,
    )


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    for dtype in (torch.float32, torch.bfloat16):
        for n in SIZES:
            name = f"k-th magnitude of {n >> 20} Mi {str(dtype).removeprefix('torch.')}"
            yield name, partial(kth, name, n, dtype, device)
    for lower in (False, True):
        name = f"counts of {'lower' if lower else 'upper'} bits, 64 Mi float32"
        yield name, partial(a_pass, name, SIZES[-1], lower, device)
    name = "mask applied to 64 Mi float32"
    yield name, partial(masked, name, SIZES[-1], device)
    name = "step of AdamW, 4 layers of 1024, 256 rows, masks held"
    yield name, partial(step, name, device)


def _row(case: str, percent: dict[str, list[float]]) -> Row:
    rounded = {name: [round(value, 2) for value in values] for name, values in percent.items()}
    row: Row = {"bench": "pruned_digits", "case": case, "device": "cpu", "us": {}, "speedup": {}}
    means = ", ".join(f"{name} {statistics.mean(v):.2f}" for name, v in rounded.items())
    print(f"{case:40} {means}", flush=True)
    return {**row, "percent_read": rounded, **stamp()}


def accuracy_rows() -> Iterator[Row]:
    """Percent of held-out digits that are read, seed by seed."""
    digits = runs.load()
    networks = {seed: runs.dense(digits, seed) for seed in SEEDS}
    yield _row("64-256-128-10", {"dense": [digits.accuracy(m) for m in networks.values()]})
    for widths in ((64, 64, 10), (64, 48, 32, 10)):
        read = [digits.accuracy(runs.dense(digits, seed, *widths)) for seed in SEEDS]
        yield _row("-".join(map(str, widths)), {"dense": read})
    for sparsity in SPARSITIES:
        shots = [
            runs.one_shot(digits, copy.deepcopy(networks[seed]), sparsity, seed=seed)
            for seed in SEEDS
        ]
        slowly = [
            runs.prune_gradually(digits, copy.deepcopy(networks[seed]), sparsity, seed=seed)
            for seed in SEEDS
        ]
        yield _row(
            f"64-256-128-10, sparsity {sparsity}",
            {
                "one shot": [once for once, _ in shots],
                f"{runs.AFTER_EPOCHS} epochs after it": [later for _, later in shots],
                f"gradual in {runs.GRADUAL_EPOCHS} epochs": slowly,
            },
        )
    yield _lottery_row(digits)


def _lottery_row(digits: runs.Digits) -> Row:
    tickets, controls = [], []
    config = LotteryConfig(rounds=8, rate=0.4, only=runs.ALL)
    for seed in range(3):

        def train(model, masks, *, first, last, seed=seed):  # type: ignore[no-untyped-def]
            end = runs.DENSE_EPOCHS * runs.EPOCH if last is None else last
            runs.train(digits, model, masks, first=first, last=end, seed=seed)

        def make(draw: int, seed: int = seed) -> nn.Module:
            return runs.network(100 * draw + seed)

        for ticket in lottery(make, train, config):
            accuracy = digits.accuracy(ticket.model)
        tickets.append(accuracy)
        controls.append(digits.accuracy(ticket.control(seed=1)))
    return _row(
        "64-256-128-10, lottery of 8 rounds of 40 %",
        {"ticket": tickets, "another draw under its mask": controls},
    )


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`, and the accuracies ("digits")."""
    wanted = options.only or ""
    chosen = [make for name, make in cases(options.device) if wanted in name]
    rows = run_cases(chosen, rounds=options.rounds) if chosen else []
    if wanted not in ("", "digits"):
        return rows
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [*rows, *accuracy_rows()]
    finally:
        torch.set_num_threads(threads)
