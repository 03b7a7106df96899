"""The asynchronous schedules: no flush, so no bubble; micro-batches in flight meet different weights.

    rank 0   0F0 0F1 0F2 0B0 0U0 0F3 0B1 0U1 0F4 ...       M micro-batches are the whole run, with one start and one end

    n ranks, step t          the gradient that makes w_{t+1} from w_t
    pipedream                of f(w_1^{t-n+1}, ..., w_n^t): a micro-batch's backward meets the weights of its forward
    pipedream, vertical      of f(w^{t-n+1}): and all ranks those that the first one had
    pipedream_2bw            of f(w^{t-1}), over micro-batches m A .. (m + 1) A - 1 with A >= n: two versions are enough
    pipemare                 forward with what is newest then, backward with what is newest then: one version

Sources: PipeDream, Narayanan et al., SOSP 2019, section 3.3; PipeDream-2BW, Narayanan et al., ICML 2021, section 3.1; PipeMare,
Yang et al., MLSys 2021, section 3.
"""

from __future__ import annotations

from pyops.pipeline.action import Action
from pyops.pipeline.families import alternate
from pyops.pipeline.schedule import Schedule

__all__ = ["pipedream", "pipedream_2bw", "pipemare"]


def pipedream(ranks: int, microbatches: int, *, vertical_sync: bool = False) -> Schedule:
    """A step after every backward; rank s keeps K - s versions of its weights, with vertical_sync K of them."""
    return _continuous("pipedream", ranks, microbatches, accumulate=1, weights="vertical" if vertical_sync else "stash",
                       options={"vertical_sync": vertical_sync})  # fmt: skip


def pipedream_2bw(ranks: int, microbatches: int, *, accumulate: int | None = None) -> Schedule:
    """A step after every `accumulate` backwards (default: K, the fewest), with the gradient of the weights before the last."""
    accumulate = ranks if accumulate is None else accumulate
    if accumulate < ranks:
        raise ValueError(
            f"accumulate is {accumulate}, but {ranks} ranks have up to {ranks} micro-batches in flight, which need a third "
            f"version of the weights; set it to {ranks} or more"
        )
    return _continuous("pipedream_2bw", ranks, microbatches, accumulate=accumulate, weights="two")


def pipemare(ranks: int, microbatches: int, *, accumulate: int = 1, warmup: str = "a") -> Schedule:
    """A step after every `accumulate` backwards, with whatever weights there are; `Schedule.delay` tells how old they are.

    warmup: as in `one_f_one_b`; "b" has as many micro-batches in flight as a pipeline of separate forward and backward.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate is {accumulate}; give the micro-batches of a step, 1 or more")
    return _continuous("pipemare", ranks, microbatches, accumulate=accumulate, weights="newest", warmup=warmup)


def _continuous(
    name: str, ranks: int, microbatches: int, *, accumulate: int, weights: str, warmup: str = "a",
    options: dict[str, object] | None = None,
) -> Schedule:  # fmt: skip
    if warmup not in ("a", "b"):
        raise ValueError(f"warmup is {warmup!r}; give 'a', as many micro-batches in flight as ranks, or 'b', twice that")
    orders = []
    for s in range(ranks):
        forwards = [Action(s, "F", m) for m in range(microbatches)]
        backwards = [Action(s, "B", m) for m in range(microbatches)]
        order: list[Action] = []
        for action in alternate(forwards, backwards, ranks - s if warmup == "a" else 2 * (ranks - s) - 1):
            order.append(action)
            step, rest = divmod(action.number + 1, accumulate)
            if action.kind == "B" and (not rest or action.number + 1 == microbatches):
                order.append(Action(s, "U", step - 1 if not rest else step))
        orders.append(tuple(order))
    return Schedule(name, microbatches, tuple(orders), tuple(range(ranks)), weights,
                    {"accumulate": accumulate, "warmup": warmup, **(options or {})})  # fmt: skip
