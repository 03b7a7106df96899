"""The synchronous schedules: every micro-batch meets the same weights, and one optimizer step
follows.

    K ranks, M micro-batches, v stages on each rank; F, B: time of a forward and a backward;
    B = I + W

    name             order                                time
    gpipe            all forwards, all backwards          (M + K - 1)(F + B)
    1f1b             a backward as soon as there is one   (M + K - 1)(F + B)
    interleaved      1f1b over K v stages                 (M + (K - 1) / v)(F + B)
    zb1p             1f1b, W where nothing else is due    M (F + B) + (K - 1)(F + I - W)
    interleaved_zb   both
    zbv              stages go down the ranks and up      M (F + B), + (K - 1) F until the step

    activations that a rank keeps, in micro-batches: gpipe M; 1f1b min(M, K - s) on rank s;
    interleaved (2 (K - 1 - r) + (v - 1) K + 1) / v on rank r; zb1p min(M, K); zbv K

Sources: GPipe, Huang et al., NeurIPS 2019. 1f1b: DAPPLE, Fan et al., PPoPP 2021, section 4 (warm-up
policies A and B), and PipeDream-Flush. interleaved: Narayanan et al., SC 2021, section 2.2. zb1p
(ZB-H1) and zbv: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, and "Pipeline Parallelism
with Controllable Memory", 2024.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.schedule import Schedule

__all__ = ["alternate", "gpipe", "interleaved", "interleaved_zb", "one_f_one_b", "zb1p", "zbv"]

Order = list[Action]


def gpipe(ranks: int, microbatches: int, *, reverse: bool = False) -> Schedule:
    """All forwards, then all backwards.

    Args:
        reverse: The last micro-batch's backward first.
    """
    backwards = range(microbatches)[:: -1 if reverse else 1]
    orders = [
        [*(Action(s, "F", m) for m in range(microbatches)), *(Action(s, "B", m) for m in backwards)]
        for s in range(ranks)
    ]
    return _schedule("gpipe", microbatches, orders, range(ranks), reverse=reverse)


def one_f_one_b(ranks: int, microbatches: int, *, warmup: int | str = "a") -> Schedule:
    """A backward as soon as there is one, so that rank s keeps min(M, K - s) micro-batches.

    Args:
        warmup: How many forwards rank s does before its first backward: "a" K - s, the fewest; "b"
            2 (K - s) - 1, which hides the time that transfers take at the cost of memory (DAPPLE's
            policies); or a number for the most, on rank 0, each rank having one less than the one
            before, but never fewer than policy A.
    """
    if warmup not in ("a", "b") and (
        isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1
    ):
        raise ValueError(
            f"warmup is {warmup!r}; give 'a', 'b', or the number of forwards on rank 0 "
            "before its first backward"
        )
    orders = []
    for s in range(ranks):
        least = ranks - s
        depth = (
            least
            if warmup == "a"
            else 2 * least - 1
            if warmup == "b"
            else max(least, int(warmup) - s)
        )
        orders.append(
            alternate(
                [Action(s, "F", m) for m in range(microbatches)],
                [Action(s, "B", m) for m in range(microbatches)],
                depth,
            )
        )
    return _schedule("1f1b", microbatches, orders, range(ranks), warmup=warmup)


def zb1p(ranks: int, microbatches: int) -> Schedule:
    """1f1b whose backward is split: rank s puts each W off by s micro-batches, into what would be
    bubbles."""
    orders = []
    for s in range(ranks):
        forwards = [Action(s, "F", m) for m in range(microbatches)]
        inputs = [Action(s, "I", m) for m in range(microbatches)]
        orders.append(_defer(alternate(forwards, inputs, ranks - s), deferred_weight_grad=s))
    return _schedule("zb1p", microbatches, orders, range(ranks))


def interleaved(ranks: int, microbatches: int, *, v: int = 2) -> Schedule:
    """1f1b over K v stages, stage s on rank s mod K: the bubble is v times smaller, transfers v
    times as many."""
    orders = [
        _interleave(ranks, microbatches, v, rank, backward="B", eager=2) for rank in range(ranks)
    ]
    return _schedule(
        "interleaved", microbatches, orders, [s % ranks for s in range(ranks * v)], v=v
    )


def interleaved_zb(ranks: int, microbatches: int, *, v: int = 2) -> Schedule:
    """`interleaved` with W put off as in `zb1p`."""
    orders = [
        _defer(
            _interleave(ranks, microbatches, v, rank, backward="I", eager=1),
            deferred_weight_grad=rank,
        )
        for rank in range(ranks)
    ]
    return _schedule(
        "interleaved_zb", microbatches, orders, [s % ranks for s in range(ranks * v)], v=v
    )


def zbv(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank, in a V: rank r has stages r and 2 K - 1 - r, so the loss is where the
    first stage is.

    Made for at least 2 K - 1 micro-batches; those that are not there are left out.
    """
    made = max(microbatches, 2 * ranks - 1)
    orders = [_v_order(ranks, rank, made, microbatches) for rank in range(ranks)]
    return _schedule("zbv", microbatches, orders, [*range(ranks), *reversed(range(ranks))])


def _schedule(
    name: str, microbatches: int, orders: Iterable[Order], rank_of: Iterable[int], **options: object
) -> Schedule:
    return Schedule(name, microbatches, tuple(map(tuple, orders)), tuple(rank_of), options=options)


def alternate(forwards: Order, backwards: Order, depth: int) -> Order:
    """`depth` forwards, then a backward and a forward in turn, then the backwards that are left."""
    depth = min(depth, len(forwards))
    order = forwards[:depth]
    for i, forward in enumerate(forwards[depth:]):
        order += [backwards[i], forward]
    return order + backwards[len(forwards) - depth :]


def _defer(order: Order, *, deferred_weight_grad: int) -> Order:
    """With a W after each I, but `deferred_weight_grad` of them later; from the last forward on, as
    early as that allows."""
    made: Order = []
    due: Order = []
    for action in order:
        made.append(action)
        if action.kind == "I":
            due.append(Action(action.stage, "W", action.number))
            if len(due) > deferred_weight_grad:
                made.append(due.pop(0))
    return made + due


def _interleave(
    ranks: int, microbatches: int, v: int, rank: int, *, backward: str, eager: int
) -> Order:
    """Micro-batches in groups of K, each group through all chunks of the rank; made for whole
    groups, the surplus left out.

    eager: forwards ahead of the next rank's at the beginning.
    """
    groups = -(-microbatches // ranks)
    forwards, backwards = [], []
    for group in range(groups):
        for chunk in range(v):
            for m in range(group * ranks, (group + 1) * ranks):
                forwards.append(Action(chunk * ranks + rank, "F", m))
                backwards.append(Action((v - 1 - chunk) * ranks + rank, backward, m))
    depth = eager * (ranks - 1 - rank) + (v - 1) * ranks + 1
    return [
        action for action in alternate(forwards, backwards, depth) if action.number < microbatches
    ]


def _v_order(ranks: int, rank: int, made: int, microbatches: int) -> Order:
    """Phases of one rank: each repeats a pattern of d (down, stage r) and u (up, stage 2 K - 1 -
    r)."""
    stage, ahead = {"d": rank, "u": 2 * ranks - 1 - rank}, ranks - rank
    phases = [
        ("dF", 2 * ahead - 1),
        ("uF dF", rank),
        ("uF uI uW", ahead),
        ("dF dI dW uF uI uW", made - ranks),
        ("dI uI", rank),
        ("dI dW", ahead),
        ("uW", rank),
        ("dW", rank),
    ]
    done: dict[str, int] = {}
    order: Order = []
    for pattern, times in phases:
        for what in pattern.split() * times:
            index = done.get(what, 0)
            done[what] = index + 1
            if index < microbatches:
                order.append(Action(stage[what[0]], what[1], index))
    return order
