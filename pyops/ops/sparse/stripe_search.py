"""The order of a matrix' columns of which 2 of each 4 by magnitude keep most, found by a search.

    stripes   four columns each; every row keeps the two largest magnitudes of a stripe
    window    two stripes; its 8 columns can be divided among them in 35 ways

    1  the best division of every window, and what it gains
    2  the best divisions are made, largest gain first, of windows that share no stripe
    3  again from 1 for windows with a stripe that changed, until nothing is gained
    4  escapes: a column of each of three stripes moves to the next of them, and 3 again; what does
       not keep more is undone

(Pool and Yu, "Channel Permutations for N:M Sparsity", NeurIPS 2021, whose default this is but for
step 4.) Gains are sums in float64 in the order of the rows, and ties go to the lower division and
to the lower stripes: the same order of columns on every machine, for any number of threads. A
window costs 70 sums of two for each row. On CUDA tensors the CPU's kernel is called.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from pyops.ops.library import by_torch_on_cuda, define

__all__ = ["check", "kept_magnitude", "stripe_search", "stripe_search_reference"]

STRIPE = 4
SUBSETS = tuple(combinations(range(2 * STRIPE), STRIPE))  # the rest of subset i is subset 69 - i
DIVISIONS = len(SUBSETS) // 2
WORD = (1 << 64) - 1


def stripe_search(magnitudes: Tensor, *, escapes: int = 100, seed: int = 0) -> Tensor:
    """The order of columns that keeps most, as far as the search finds.

    Args:
        magnitudes: float64 [rows, columns], 0 or more, a multiple of 4 columns.
        escapes: how often it is tried to leave where nothing is gained any more.
        seed: of the escapes.

    Returns:
        int64 [columns]: which column comes to each place; `magnitudes[:, order]` keeps no less than
        `magnitudes`.

    Raises:
        ValueError: for another shape, and for numbers that are negative or nan.
        TypeError: for another dtype.
    """
    check(magnitudes, escapes)
    if magnitudes.numel() and not bool((magnitudes >= 0).all()):
        raise ValueError(
            "stripe_search: magnitudes must be 0 or more; got some that are negative or nan: give "
            "w.abs()"
        )
    found: Tensor = torch.ops.pyops.stripe_search.default(magnitudes, escapes=escapes, seed=seed)
    return found


def check(magnitudes: Tensor, escapes: int) -> None:
    """Raise ValueError or TypeError unless `stripe_search` can be asked of these."""
    if magnitudes.dtype != torch.float64:
        raise TypeError(
            f"stripe_search: magnitudes must be float64; got {magnitudes.dtype}: call .double()"
        )
    if magnitudes.dim() != 2 or magnitudes.shape[1] % STRIPE:
        raise ValueError(
            "stripe_search: magnitudes must be [rows, columns] with a multiple of 4 columns; got "
            f"{list(magnitudes.shape)}"
        )
    if escapes < 0:
        raise ValueError(f"stripe_search: escapes must be 0 or more; got {escapes}")


def kept_magnitude(magnitudes: Tensor) -> float:
    """What 2 of each 4 consecutive columns keep: a sum in float64, by stripes of sums by rows.

    Args:
        magnitudes: [rows, columns], a multiple of 4 columns.
    """
    largest = magnitudes.double().unflatten(1, (-1, STRIPE)).topk(2, dim=2).values.sum(2)
    return float(largest.sum(0).sum())


class _Search:
    """The search in plain torch, one window after the other."""

    def __init__(self, magnitudes: Tensor) -> None:
        self.columns = magnitudes.detach().double().t().contiguous()
        self.stripes = len(self.columns) // STRIPE
        self.order = list(range(len(self.columns)))
        self.gains: dict[tuple[int, int], tuple[float, int]] = {}
        self.touched = set(range(self.stripes))

    def improve(self) -> None:
        while self.touched:
            self._evaluate()
            self._apply()

    def _evaluate(self) -> None:
        for s, t in combinations(range(self.stripes), 2):
            if s in self.touched or t in self.touched:
                self.gains[s, t] = self._best(self._window(s, t))
        self.touched = set()

    def _window(self, s: int, t: int) -> list[int]:
        return [self.order[STRIPE * x + c] for x in (s, t) for c in range(STRIPE)]

    def _best(self, window: list[int]) -> tuple[float, int]:
        """(gain, division) of a window's columns."""
        subsets = self.columns[window][torch.tensor(SUBSETS)]
        two = subsets.topk(2, dim=1).values.sum(1)
        sums = torch.zeros(len(SUBSETS), dtype=torch.float64, device=two.device)
        for row in two.unbind(1):
            sums = sums + row
        kept = (sums[:DIVISIONS] + sums.flip(0)[:DIVISIONS]).tolist()
        best = max(range(DIVISIONS), key=lambda d: (kept[d], -d))
        return kept[best] - kept[0], best

    def _apply(self) -> None:
        found = [(-gain, s, t, d) for (s, t), (gain, d) in self.gains.items() if gain > 0.0]
        for _, s, t, division in sorted(found):
            if s in self.touched or t in self.touched:
                continue
            self.touched |= {s, t}
            window = self._window(s, t)
            for x, subset in ((s, SUBSETS[division]), (t, SUBSETS[-1 - division])):
                self.order[STRIPE * x : STRIPE * (x + 1)] = [window[i] for i in subset]

    def escape(self, escapes: int, seed: int) -> None:
        if self.stripes < 3:
            return
        best = self.kept()
        for number in range(escapes):
            before = list(self.order), dict(self.gains)
            self._exchange(seed, number)
            self.improve()
            found = self.kept()
            if found > best:
                best = found
            else:
                self.order, self.gains = before

    def _exchange(self, seed: int, number: int) -> None:
        left = list(range(self.stripes))
        stripes = [left.pop(_drawn(seed, number, i, len(left))) for i in range(3)]
        self.touched |= set(stripes)
        a, b, c = (
            STRIPE * stripe + _drawn(seed, number, 3 + i, STRIPE)
            for i, stripe in enumerate(stripes)
        )
        order = self.order
        order[a], order[b], order[c] = order[c], order[a], order[b]

    def kept(self) -> float:
        largest = self.columns[self.order].unflatten(0, (-1, STRIPE)).topk(2, dim=1).values.sum(1)
        total = 0.0
        for stripe in largest:
            kept = 0.0
            for value in stripe.tolist():
                kept += value
            total += kept
        return total


def _drawn(seed: int, escape: int, draw: int, n: int) -> int:
    """A number below n for each draw of an escape (splitmix64; Steele et al., 2014)."""
    z = (seed + 0x9E3779B97F4A7C15 * (8 * escape + draw + 1)) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return (z ^ (z >> 31)) % n


def stripe_search_reference(magnitudes: Tensor, *, escapes: int, seed: int) -> Tensor:
    """The op in plain Python and torch; slow."""
    check(magnitudes, escapes)
    search = _Search(magnitudes.cpu())
    search.improve()
    search.escape(escapes, seed)
    return torch.tensor(search.order, dtype=torch.int64, device=magnitudes.device)


def _fake(magnitudes: Tensor, *, escapes: int, seed: int) -> Tensor:
    return magnitudes.new_empty(magnitudes.shape[1], dtype=torch.int64)


def _on_host(magnitudes: Tensor, *, escapes: int, seed: int) -> Tensor:
    found: Tensor = torch.ops.pyops.stripe_search.default(
        magnitudes.cpu(), escapes=escapes, seed=seed
    )
    return found.to(magnitudes.device)


define(
    "stripe_search(Tensor magnitudes, *, int escapes, int seed) -> Tensor",
    reference=stripe_search_reference,
    fake=_fake,
)
by_torch_on_cuda("stripe_search", _on_host)
