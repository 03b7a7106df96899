"""The blocks of a model, its ends and its optimizer, timed at the shapes that a rank has.

    1 block, 3 blocks      half of the difference is a block, the rest embedding, head and loss
    1 row, 4 rows          what does not depend on the rows, and what each takes
    tp 2                   a block with half of the heads and half of the MLP

All ranks compute at the same time, as in training: they share caches and memory bandwidth. What a
rank computes is measured on its processor's clock where it has one thread, so that other programs,
which take turns with it, do not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops import recompute
from pyops.comm.agreement import gather
from pyops.mesh import ProcessGroupLike, resolve
from pyops.models import GPT
from pyops.optim import AdamW
from pyops.plan.costs.measured import Line, MeasuredCosts
from pyops.plan.shapes import ModelShape, PlanError
from pyops.precision import PRECISIONS

__all__ = ["ELEMENTS", "launch_seconds", "measure_blocks", "optimizer_step", "seconds_of"]

FEW, MANY = 1, 3  # blocks
ROWS = (1, 4)
LONG = 0.2  # seconds of a forward, beyond which two rows must do in place of four
ROUNDS = 9
ELEMENTS = (1 << 18, 1 << 22)  # of the optimizer
LAUNCHES = 100


def _clock() -> float:
    """Of the processor that computes; of the wall where several threads do."""
    return time.perf_counter() if torch.get_num_threads() > 1 else time.process_time()


def _typical(several: Sequence[float]) -> float:
    """The lower quartile: what disturbs makes times longer."""
    return statistics.quantiles(several, n=4)[0]


@dataclass
class _Trial:
    """A model with some blocks, and rows for it."""

    model: GPT
    tokens_BT: Tensor

    def run(self) -> tuple[float, float]:
        """Seconds of a forward and of its backward."""
        start = _clock()
        rows, length = self.tokens_BT.shape
        self.model.set_dropout((rows, length), seed=0, step=0)
        loss = self.model(self.tokens_BT, self.tokens_BT)
        middle = _clock()
        loss.backward()
        return middle - start, _clock() - middle


def _trial(shape: ModelShape, *, tp: int, layers: int, rows: int, precision: str) -> _Trial:
    model = GPT(shape.gpt_config(tp=tp, num_layers=layers), dtype=PRECISIONS[precision].dtype)
    return _Trial(model, torch.zeros(rows, shape.sequence_length, dtype=torch.int64))


def _rounds(trials: Sequence[_Trial], group: dist.ProcessGroup | None) -> list[tuple[float, float]]:
    """Of each trial, typical seconds of a forward and a backward, all in turn."""
    found: list[list[tuple[float, float]]] = [[] for _ in trials]
    for turn in range(ROUNDS + 1):
        for times, trial in zip(found, trials, strict=True):
            if group is not None:
                dist.barrier(group)
            seconds = trial.run()
            if turn:  # the first one warms up
                times.append(seconds)
    return [(_typical([f for f, _ in each]), _typical([b for _, b in each])) for each in found]


def _recomputing(shape: ModelShape, *, rows: int, precision: str) -> _Trial:
    """One whose blocks are computed again in backward."""
    trial = _trial(shape, tp=1, layers=MANY, rows=rows, precision=precision)
    recompute.apply(trial.model, ["blocks.*"])
    return trial


def _rows(shape: ModelShape, precision: str) -> tuple[int, int]:
    trial = _trial(shape, tp=1, layers=FEW, rows=1, precision=precision)
    trial.run()
    return ROWS if sum(trial.run()) < LONG else (1, 2)


def launch_seconds() -> float:
    """Of an operation that has next to nothing to do."""
    small = torch.zeros(8)
    return seconds_of(lambda: small.add_(1.0), LAUNCHES)


def seconds_of(call: Callable[[], object], count: int = 1) -> float:
    """Typical seconds of a call.

    Args:
        call: What is timed.
        count: How often in a row.
    """
    found = []
    for turn in range(ROUNDS + 1):
        start = _clock()
        for _ in range(count):
            call()
        if turn:
            found.append((_clock() - start) / count)
    return _typical(found)


def optimizer_step(number: int, precision: str) -> float:
    """Seconds of a step of AdamW over one parameter of so many elements, with its norm.

    Args:
        number: Of elements.
        precision: "fp32", "bf16" or "fp16".
    """
    kind = PRECISIONS[precision]
    parameter = nn.Parameter(torch.zeros(number, dtype=kind.dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = AdamW([parameter], max_grad_norm=1.0, master_weights=kind.master_weights)
    return seconds_of(optimizer.step)


def measure_blocks(
    shape: ModelShape,
    *,
    precision: str = "fp32",
    tp: Iterable[int] = (1,),
    group: ProcessGroupLike = None,
) -> MeasuredCosts:
    """Time a model's blocks here, on the CPU. A collective: all ranks measure at the same time, and
    have the same result, the mean.

    Args:
        shape: Of the model.
        precision: "fp32", "bf16" or "fp16".
        tp: Degrees of tensor parallelism; those that can't cut the heads are left out.
        group: The ranks. None: the default group, or this process alone where torch.distributed is
            not initialized.

    Raises:
        PlanError: For a precision that there is not.
    """
    if precision not in PRECISIONS:
        raise PlanError(f"precision is {precision!r}; choose one of {', '.join(PRECISIONS)}")
    ranks = resolve(group, "measure_blocks")
    few, many = _rows(shape, precision)
    if ranks is not None:
        many = min(gather(many, group=ranks))
    degrees = [t for t in sorted({1, *tp}) if shape.kv_heads % t == 0 and shape.inner % t == 0]
    cases = [(t, n, r) for t in degrees for n in (FEW, MANY) for r in (few, many)]
    trials = [_trial(shape, tp=t, layers=n, rows=r, precision=precision) for t, n, r in cases]
    trials.append(_recomputing(shape, rows=many, precision=precision))
    timed = _rounds(trials, ranks)
    del trials
    optimizer = [optimizer_step(number, precision) for number in ELEMENTS]
    own = [*timed, tuple(optimizer), (launch_seconds(),) * 2]
    every = gather(own, group=ranks) if ranks is not None else [own]
    means = [
        tuple(statistics.fmean(values) for values in zip(*each, strict=True))
        for each in zip(*every, strict=True)
    ]
    seconds = dict(zip(cases, means, strict=False))
    longer = sum(means[len(cases)]) - sum(seconds[1, MANY, many])

    def lines(part: int, *, blocks: bool) -> dict[int, Line]:
        found = {}
        for t in degrees:
            points = []
            for rows in (few, many):
                one, several = seconds[t, FEW, rows][part], seconds[t, MANY, rows][part]
                block = max(0.0, several - one) / (MANY - FEW)
                points.append((float(rows), block if blocks else max(0.0, one - FEW * block)))
            found[t] = Line.through(*points)
        return found

    small_step, large_step = means[-2]
    forward = lines(0, blocks=True)
    return MeasuredCosts(
        forward=forward,
        backward=lines(1, blocks=True),
        ends_forward=lines(0, blocks=False),
        ends_backward=lines(1, blocks=False),
        optimizer=Line.through((ELEMENTS[0], small_step), (ELEMENTS[1], large_step)),
        launch=means[-1][0],
        again=max(0.0, longer) / (MANY * forward[1].at(many)),
        facts={"ranks": str(len(every)), "precision": precision, "threads": _threads()},
    )


def _threads() -> str:
    return str(torch.get_num_threads())
