"""Which weights of the parameters stay: so many of each, or of all together, by a score.

layer    each parameter by itself
global   all together; a parameter that would keep less than its floor keeps just that, and the
         others share what is left
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyops.ops.sparse.radix_count import Threshold, kth_magnitude, magnitude_patterns
from pyops.pruning.ranking.holdings import Holding, Holdings
from pyops.pruning.ranking.threshold import kth_place

__all__ = ["kept_of", "select_by_layer", "select_together"]

Scores = Mapping[str, Tensor]  # of each holding's values, flat; by the holding's name


def kept_of(numel: int, sparsity: float) -> int:
    """How many of so many stay: numel - round(sparsity numel)."""
    return numel - round(sparsity * numel)


class _Pool:
    """Parameters that are ranked together.

    Args:
        names: The parameters.
        within: bool, flat, for each holding, of those that may stay; None: all.
    """

    def __init__(
        self,
        holdings: Holdings,
        names: Sequence[str],
        scores: Scores,
        within: Mapping[str, Tensor] | None,
    ) -> None:
        self._all, self._scores, self._within = holdings, scores, within
        self.held = holdings.of(names)

    def _places(self, each: Holding) -> Tensor | None:
        """Among its values, of those that are ranked; None: all."""
        inside = each.inside
        if self._within is None:
            return inside
        alive = self._within[each.name]
        if inside is None:
            return alive.nonzero().view(-1)
        return inside[alive[inside]]

    def keep(self, k: int) -> dict[str, Tensor]:
        """bool, flat, of each holding's values: the k largest of the pool. A collective."""
        held = self.held
        if k == 0:
            return {e.name: torch.zeros_like(self._scores[e.name], dtype=torch.bool) for e in held}
        places = {each.name: self._places(each) for each in held}
        ranked = {
            e.name: self._scores[e.name] if p is None else self._scores[e.name][p]
            for e, p in ((each, places[each.name]) for each in held)
        }
        counted = [ranked[e.name] for e in held if e.counted]
        none = torch.zeros(0, device=self._all.device)
        found = kth_magnitude([*counted, none], k, reduce=self._all.reduce)
        patterns = {name: magnitude_patterns(x) for name, x in ranked.items()}
        last = self._last_place(found, k, patterns, places)
        kept = {}
        for each in held:
            pattern, at = patterns[each.name], places[each.name]
            stays = pattern > found.pattern
            equal = (pattern == found.pattern).nonzero().view(-1)
            if len(equal):
                here = equal if at is None else at[equal]
                stays[equal] = each.index(here) + self._all.first[each.name] <= last
            if at is not None:
                whole = torch.zeros_like(self._scores[each.name], dtype=torch.bool)
                whole[at] = stays
                stays = whole
            kept[each.name] = stays
        return kept

    def _last_place(
        self,
        found: Threshold,
        k: int,
        patterns: Mapping[str, Tensor],
        places: Mapping[str, Tensor | None],
    ) -> int:
        """The place of the last of equals that stays."""
        total = sum(self._all.numel(name) for name in self._all.shapes)
        if found.above + found.equal == k:
            return total
        mine = []
        for each in self.held:
            if each.counted:
                equal = (patterns[each.name] == found.pattern).nonzero().view(-1)
                at = places[each.name]
                here = equal if at is None else at[equal]
                mine.append(each.index(here) + self._all.first[each.name])
        return kth_place(
            mine,
            k - found.above,
            total=total,
            device=self._all.device,
            reduce=self._all.reduce,
        )


def select_by_layer(
    holdings: Holdings,
    scores: Scores,
    sparsity: float,
    *,
    within: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """bool, flat, of each holding's values: of each parameter the n - round(sparsity n) largest. A
    collective.

    Args:
        holdings: What the ranks have.
        scores: What is ranked, by its magnitude.
        sparsity: Of each parameter.
        within: Those that may stay, as what is returned; None: all.
    """
    alive: dict[str, Tensor] = {}
    for name in holdings.shapes:
        pool = _Pool(holdings, [name], scores, within)
        alive.update(pool.keep(kept_of(holdings.numel(name), sparsity)))
    return alive


def select_together(
    holdings: Holdings,
    scores: Scores,
    sparsity: float,
    *,
    least: float = 0.0,
    within: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """As `select_by_layer`, of all parameters together.

    Args:
        holdings: What the ranks have.
        scores: What is ranked, by its magnitude.
        sparsity: Of all together.
        least: The share of each parameter that stays in any case.
        within: Those that may stay; None: all.

    Raises:
        ValueError: The floors add up to more than what is to stay.
    """
    numels = {name: holdings.numel(name) for name in holdings.shapes}
    floors = {name: math.ceil(least * n) for name, n in numels.items()}
    keep = kept_of(sum(numels.values()), sparsity)
    if sum(floors.values()) > keep:
        raise ValueError(
            f"sparsity {sparsity} keeps {keep} of {sum(numels.values())} weights, but least="
            f"{least} keeps {sum(floors.values())}; give a least of at most "
            f"{keep / sum(numels.values()):.6g}"
        )
    alive: dict[str, Tensor] = {}
    open_names = list(numels)
    while open_names:
        found = _Pool(holdings, open_names, scores, within).keep(keep)
        counts = holdings.total(_counts(holdings, found))
        short = [name for name in open_names if counts[name] < floors[name]]
        if not short:
            return alive | found
        for name in short:
            alive.update(_Pool(holdings, [name], scores, within).keep(floors[name]))
            keep -= floors[name]
            open_names.remove(name)
    return alive


def _counts(holdings: Holdings, alive: Mapping[str, Tensor]) -> dict[str, int]:
    """How many this rank counts in each."""
    return {e.name: int(alive[e.name].sum()) for e in holdings if e.counted and e.name in alive}
