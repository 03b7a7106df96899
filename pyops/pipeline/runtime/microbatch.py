"""Micro-batches: a batch of N rows cut into M runs of N // M or one more, and how much each counts
in the loss.

    10 rows, M = 4      | 0 1 2 | 3 4 5 | 6 7 | 8 9 |        the loss of each counts 3/10, 3/10, 2/10, 2/10

A loss that is a mean over rows is then the whole batch's, and so are the gradients: what a
micro-batch counts is the gradient that its backward begins with, and nothing is divided afterwards.
Losses that are means over something else, such as tokens that are not padding, count by what
`count` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["cut", "loss_weights", "num_rows"]


def num_rows(batch: Any) -> int | None:
    """The size of the first dim of the tensors in `batch`; None where there is none. ValueError
    where they differ."""
    sizes = {
        leaf.shape[0] for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.dim()
    }
    if len(sizes) > 1:
        raise ValueError(
            f"the batch has tensors of {sorted(sizes)} rows; all must have as many, in "
            "their first dim"
        )
    return sizes.pop() if sizes else None


def cut(batch: Any, microbatches: int, *, rows: int | None = None) -> list[Any]:
    """`batch`, tensors anywhere in tuples, lists and dicts, as a list of micro-batches of its rows.

    rows: what a tensor's first dim must be for it to be cut; others, and all that is no tensor, go
    whole to every micro-batch. None: that of the tensors in `batch`. ValueError for fewer rows than
    micro-batches.
    """
    if isinstance(batch, Tensor) and rows is None:  # the usual case
        _check(batch.shape[0] if batch.dim() else 0, microbatches)
        return list(batch.tensor_split(microbatches))
    leaves, structure = tree_flatten(batch)
    rows = num_rows(batch) if rows is None else rows
    if rows is not None:
        _check(rows, microbatches)
    parts: list[Sequence[Any]] = [
        leaf.tensor_split(microbatches)
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows
        else [leaf] * microbatches
        for leaf in leaves
    ]
    return [tree_unflatten([part[m] for part in parts], structure) for m in range(microbatches)]


def loss_weights(targets: Sequence[Any], count: Callable[[Any], Any] | None) -> list[float]:
    """How much each micro-batch counts in the mean: by its rows, or by what `count` says of its
    target. They sum to 1.

    ValueError for counts that are negative, or all 0.
    """
    counts = (
        [float(count(target)) for target in targets]
        if count
        else [float(num_rows(target) or 1) for target in targets]
    )
    total = sum(counts)
    if not all(each >= 0 for each in counts) or not total > 0:
        raise ValueError(
            f"the micro-batches count {counts}; each must be 0 or more, and one of them more"
        )
    return [each / total for each in counts]


def _check(rows: int, microbatches: int) -> None:
    if rows < microbatches:
        raise ValueError(
            f"a batch of {rows} rows can't be cut into {microbatches} micro-batches; "
            f"give {microbatches} rows or more, or make "
            "the schedule with fewer micro-batches"
        )
