"""check_heads: which numbers of ranks can share the heads of attention, cut by whole groups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

__all__ = ["check_heads"]

TRIED = 4096  # sizes that a message looks at, however many heads were asked for
LISTED = 32  # sizes that it names


def _sizes(fitting: Iterator[int], H: int) -> str:
    """The first of the sizes that fit, for a message."""
    first = list(islice(fitting, LISTED + 1))
    more = " and others" if len(first) > LISTED or H > TRIED else ""
    return ", ".join(map(str, first[:LISTED])) + more


def check_heads(H: int, G: int, ranks: int) -> None:
    """ValueError for H heads in G groups that can't be split over the ranks, with the sizes that
    can."""
    small = range(1, min(H, TRIED) + 1)
    if H < 1 or G < 1 or H % G:
        divisors = _sizes((n for n in small if H % n == 0), H)
        raise ValueError(
            f"num_kv_heads is {G}, which does not divide num_heads = {H}; choose one of {divisors}"
        )

    def fit(t: int) -> bool:
        return t <= H and (t <= G or (t % G == 0 and (H // G) % (t // G) == 0))

    if not fit(ranks):
        raise ValueError(
            f"{H} heads in {G} groups can't be split over {ranks} ranks; "
            f"{_sizes(filter(fit, small), H)} ranks can. Up to {G} "
            "ranks take whole groups; beyond, a group's query heads must be shared out "
            "evenly by the ranks that hold it"
        )
