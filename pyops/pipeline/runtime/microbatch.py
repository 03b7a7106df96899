"""Micro-batches: a batch of N rows cut into M runs of N // M or one more, and how much each counts
in the loss.

    10 rows, M = 4      | 0 1 2 | 3 4 5 | 6 7 | 8 9 |     their losses count 3/10, 3/10, 2/10, 2/10

A loss that is a mean over rows is then the whole batch's, and so are the gradients: what a
micro-batch counts is the gradient that its backward begins with, and nothing is divided afterwards.
Losses that are means over something else, such as tokens that are not padding, count by
`PipelineConfig.loss_denominator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["loss_weights", "num_rows", "split_batch"]


def num_rows(batch: Any) -> int | None:
    """The size of the first dim of the tensors in `batch`; None where it has none.

    Raises:
        ValueError: Where they differ.
    """
    sizes = {
        leaf.shape[0] for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.dim()
    }
    if len(sizes) > 1:
        raise ValueError(
            f"the batch has tensors of {sorted(sizes)} rows; all must have as many, in "
            "their first dim"
        )
    return sizes.pop() if sizes else None


def split_batch(batch: Any, num_microbatches: int, *, rows: int | None = None) -> list[Any]:
    """The micro-batches of `batch`: of its rows, in their order.

    Args:
        batch: Tensors anywhere in tuples, lists and dicts.
        num_microbatches: How many.
        rows: A tensor whose first dim has this size is cut; other tensors, and all that is no
            tensor, go whole to every micro-batch. None: the first dim of the tensors in `batch`.

    Raises:
        ValueError: There are fewer rows than micro-batches.
    """
    if isinstance(batch, Tensor) and rows is None:  # the usual case
        _check(batch.shape[0] if batch.dim() else 0, num_microbatches)
        return list(batch.tensor_split(num_microbatches))
    leaves, structure = tree_flatten(batch)
    rows = num_rows(batch) if rows is None else rows
    if rows is not None:
        _check(rows, num_microbatches)
    parts: list[Sequence[Any]] = [
        leaf.tensor_split(num_microbatches)
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows
        else [leaf] * num_microbatches
        for leaf in leaves
    ]
    return [tree_unflatten([part[m] for part in parts], structure) for m in range(num_microbatches)]


def loss_weights(targets: Sequence[Any], denominator: Callable[[Any], Any] | None) -> list[float]:
    """How much each micro-batch counts in the mean: by its rows, or by `denominator` of its target.
    They sum to 1.

    Raises:
        ValueError: A denominator is negative, or all are 0.
    """
    counts = (
        [float(denominator(target)) for target in targets]
        if denominator
        else [float(num_rows(target) or 1) for target in targets]
    )
    total = sum(counts)
    if not all(each >= 0 for each in counts) or not total > 0:
        raise ValueError(
            f"the micro-batches count {counts}; each must be 0 or more, and one of them more"
        )
    return [each / total for each in counts]


def _check(rows: int, num_microbatches: int) -> None:
    if rows < num_microbatches:
        raise ValueError(
            f"a batch of {rows} rows can't be cut into {num_microbatches} micro-batches; "
            f"give {num_microbatches} rows or more, or make the schedule with fewer micro-batches"
        )
