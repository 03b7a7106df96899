"""2:4 with channels permuted: the model computes what it did, and 2 of every 4 consecutive inputs
keep more of the magnitude of its weights (Pool and Yu, "Channel Permutations for N:M Sparsity",
NeurIPS 2021).

    permuted = permute(model)            before pruning, before the optimizer is made
    permuted.gains["blocks.0.mlp.hidden"]         kept before 0.8213, after 0.8522
    nm_masks(model, NM(2, 4))
    permuted.undo()                      the channels in their old places, with their masks, whose
                                         groups then lie apart
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from pyops.flat import ChannelSet
from pyops.given_numbers import check_whole
from pyops.name_patterns import check_patterns
from pyops.ops.sparse.stripe_search import kept_magnitude, stripe_search
from pyops.pruning.masks import masks_of
from pyops.pruning.nm import NM, check_kind
from pyops.pruning.symmetries import channel_sets, columns_of, inverse, moves, rearrange

__all__ = ["Gain", "Permuted", "permute"]

GROUP = 4
SEEDS = 1 << 63


@dataclass(frozen=True)
class Gain:
    """What a permutation of some channels brought."""

    before: float
    """Share of the magnitude that 2:4 keeps of the matrices that read the channels, as they
    were."""
    after: float
    """The same, with the channels permuted."""
    unstructured: float
    """What the larger half of each of these matrices' weights would keep: no permutation keeps
    more."""


@dataclass(frozen=True)
class Permuted:
    """A model whose channels were permuted."""

    model: nn.Module
    """It."""
    gains: Mapping[str, Gain]
    """By channels."""
    orders: Mapping[str, Tensor]
    """By channels: int64, which of the former channels is at each place; for `save`."""
    skipped: Mapping[str, str]
    """Channels whose matrices could not be helped, and why."""

    def undo(self) -> None:
        """Put the channels back where they were, and masks with them."""
        rearrange(self.model, {name: inverse(order) for name, order in self.orders.items()})


def permute(
    model: nn.Module,
    *,
    pattern: NM | None = None,
    escapes: int = 100,
    seed: int = 0,
    only: Sequence[str] | None = None,
) -> Permuted:
    """Permute channels so that 2:4 keeps more, without a change of what the model computes. The
    result depends on the weights and on `seed` alone: ranks that have the same model get the same.

    Args:
        model: With a method `permutations()`; whole on this rank, without masks and adapters.
        pattern: NM(2, 4), or None for it.
        escapes: Of the search of each set of channels, see `pyops.ops.stripe_search`.
        seed: Of the escapes.
        only: Patterns of names of channels, ["blocks.*.mlp.hidden"]; None: all that a matrix reads.

    Returns:
        What it brought, and the orders.

    Raises:
        ValueError: Before anything is changed: as of `rearrange`; for another pattern; for channels
            in `only` that must stay, such as queries and keys under rotary positions, that no
            matrix reads, or that are not whole groups of 4.
    """
    pattern = NM() if pattern is None else pattern
    check_kind(pattern)
    if pattern != NM(2, 4):
        raise ValueError(f"permute searches for 2:4; got {pattern}")
    check_whole("escapes", escapes)
    check_whole("seed", seed, least=-SEEDS, most=SEEDS - 1)
    chosen, skipped = _chosen(model, only)
    gains, orders = {}, {}
    for name, magnitudes in chosen.items():
        order = stripe_search(magnitudes, escapes=escapes, seed=seed)
        total = float(magnitudes.sum()) or 1.0
        half = magnitudes.flatten().topk(magnitudes.numel() // 2).values.sum()
        gains[name] = Gain(
            kept_magnitude(magnitudes) / total,
            kept_magnitude(magnitudes[:, order]) / total,
            float(half) / total,
        )
        orders[name] = order
    rearrange(model, orders)
    return Permuted(model, gains, orders, skipped)


def _chosen(
    model: nn.Module, only: Sequence[str] | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """{name of channels: magnitudes of what reads them}, and why others are left out."""
    if only is not None:
        check_patterns(only, what="only")
    declared = channel_sets(model)
    if masked := list(masks_of(model)):
        raise ValueError(
            f"{masked[0]} is pruned already, and its groups would be taken apart; permute first, "
            "then prune"
        )
    for text in only or ():
        if not any(fnmatchcase(name, text) for name in declared):
            raise ValueError(
                f"only: {text!r} matches none of {len(declared)} sets of channels, such as "
                f"{', '.join(list(declared)[:3])}; write * for any part of a name"
            )
    found, skipped = {}, {}
    for name, channels in declared.items():
        if only is not None and not any(fnmatchcase(name, text) for text in only):
            continue
        magnitudes, why = _magnitudes(model, channels)
        if why and only is not None:
            raise ValueError(f"{name} can't be permuted for 2:4: {why}")
        if magnitudes is None:
            skipped[name] = why
        else:
            found[name] = magnitudes
    return found, skipped


def _magnitudes(model: nn.Module, channels: ChannelSet) -> tuple[Tensor | None, str]:
    """[rows, channels] of all that reads them; or None, and why."""
    if channels.fixed:
        return None, channels.fixed
    reads = [(tensor, part) for tensor, part in moves(model, channels) if part.reads]
    if not reads:
        return None, "no matrix that is pruned reads them, so that their order changes nothing"
    if channels.size % GROUP or any(at % GROUP for _, part in reads for at in part.starts):
        return None, f"the {channels.size} channels are not whole groups of {GROUP}"
    for tensor, part in reads:
        if not tensor.is_floating_point():
            return None, f"{part.name} is {tensor.dtype}: permute and prune before quantizing"
        if not bool(tensor.isfinite().all()):
            return None, f"{part.name} has a weight that is nan or infinite"
    rows = [columns_of(tensor, part, channels.size) for tensor, part in reads]
    return torch.cat(rows), ""
