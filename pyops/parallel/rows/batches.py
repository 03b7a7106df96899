"""The rows of one step: which of the global batch this rank's copy of the model has, and how they
are cut into micro-batches.

    dp 0   rows 0 1 2       first_row 0   num_rows 5   count: labels of all rows
    dp 1   rows 3 4         first_row 3
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pyops.comm.agreement import agree, gather_numbers, naming_lost_ranks
from pyops.mesh import Mesh
from pyops.parallel.losses import CountedLoss, names_of
from pyops.pipeline.runtime.microbatch import num_rows, split_batch

__all__ = [
    "BatchShare",
    "accepted_names",
    "check_batch",
    "microbatches",
    "model_arguments",
    "share_of",
    "sum_over_copies",
]

# Targets of the loss, which the model is not given.
TARGETS = ("labels",)


@dataclass(frozen=True)
class BatchShare:
    """What the copies of the model have of one global batch."""

    first_row: int
    """The number of this copy's first row in the global batch."""

    rows: int
    """Of this copy."""

    sizes: tuple[int, ...]
    """The rows of each copy."""

    count: float
    """By how many terms the sum of the losses of all rows is divided."""

    divisor: float
    """By how many their gradients are."""

    vote: bool
    """Whether any rank voted for what the ranks decide together, such as to stop."""

    @property
    def all_rows(self) -> int:
        """Of all copies."""
        return sum(self.sizes)

    @property
    def fewest_rows(self) -> int:
        """Of the copy that has the fewest."""
        return min(self.sizes)

    @property
    def most_rows(self) -> int:
        """Of the copy that has the most."""
        return max(self.sizes)


def share_of(
    batch: Any,
    given: bool,
    loss: CountedLoss,
    mesh: Mesh,
    *,
    accepted: Iterable[str],
    device: torch.device,
    vote: bool = False,
) -> BatchShare | None:
    """What each copy has of the global batch. A collective of all ranks, one small message.

    Args:
        batch: This rank's rows, as the caller gave them.
        given: Whether there are any; False where this copy has none left.
        loss: Counts their terms.
        mesh: The ranks.
        accepted: The names of the arguments of the model's forward.
        device: Of the message.
        vote: This rank's.

    Returns:
        A BatchShare; None where no copy has a batch.

    Raises:
        ValueError, TypeError: On every rank, for a batch that some rank can't use.
    """
    problem: Exception | None = None
    rows, count, divisor = 0, 0.0, 0.0
    if given:
        try:
            check_batch(batch, accepted, loss)
            rows = num_rows(dict(batch)) or 0
            if rows:
                count, divisor = loss.count(batch), loss.divisor(batch)
        except Exception as error:  # of the caller's own loss too: every rank must be told
            problem = error
    place = [mesh.rank(axis) for axis in ("dp", "tp", "pp", "cp")]
    mark = _mark(batch) if rows and mesh.size("cp") > 1 else 0
    own = [problem is None, given, rows, count, divisor, vote, mark, *place]
    everyone = gather_numbers([float(value) for value in own], device=device)
    if bad := [rank for rank, (ok, *_) in enumerate(everyone) if not ok]:
        try:
            agree(problem)
        except Exception as error:
            if problem is not None:
                raise
            raise type(error)(f"on rank {bad[0]}: {error}") from None
    _check_alike(everyone)
    mine = [float(each) for each in place[1:]]
    copies = sorted(
        (dp, has, number, terms, divided)
        for _, has, number, terms, divided, _, _, dp, *rest in everyone
        if rest == mine
    )
    if not any(has for _, has, *_ in copies):
        return None
    sizes = tuple(int(number) for _, _, number, *_ in copies)
    return BatchShare(
        first_row=sum(sizes[: place[0]]),
        rows=rows,
        sizes=sizes,
        count=sum(terms for *_, terms, _ in copies),
        divisor=sum(divided for *_, divided in copies),
        vote=any(voted for _, _, _, _, _, voted, *_ in everyone),
    )


def _mark(batch: Mapping[str, Any]) -> int:
    """A number that differs where the rows do; 0 on a GPU, which is not waited for."""
    mark = 0
    for name in sorted(batch):
        value = batch[name]
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            held = value.detach().contiguous().view(-1).view(torch.uint8)
            mark = zlib.crc32(held.numpy().tobytes(), mark)
    return mark


def _check_alike(everyone: list[list[float]]) -> None:
    """Refuse other rows on ranks that share out the tokens of the same ones.

    Args:
        everyone: What the ranks said; the mark of their rows, and their places along dp, tp, pp and
            cp, last.

    Raises:
        ValueError: On every rank, naming two of them.
    """
    first: dict[tuple[float, ...], tuple[int, float]] = {}
    for rank, (*_, mark, dp, tp, pp, _) in enumerate(everyone):
        other, theirs = first.setdefault((dp, tp, pp), (rank, mark))
        if mark != theirs:
            raise ValueError(
                f"ranks {other} and {rank} share out the tokens of the same rows (cp), and were "
                "given other ones; give each of them the rows of mesh.rank('dp')"
            )


def sum_over_copies(total: float, mesh: Mesh, *, device: torch.device) -> float:
    """The sum over the copies of the model, and over ranks that share out the tokens of rows, in
    their order. A collective of the axes "dp" and "cp".

    Args:
        total: Of this copy, and of this rank's tokens.
        mesh: The ranks.
        device: Of the message.

    Raises:
        CommunicationError: A rank is lost; the error names it.
    """
    group = mesh.group(("dp", "cp"))
    if group is None:
        return total
    own = torch.tensor(total, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(own) for _ in range(mesh.size(("dp", "cp")))]
    with naming_lost_ranks("the sum of losses", group=group):
        dist.all_gather(everyone, own, group=group)
    return math.fsum(torch.stack(everyone).tolist())


def accepted_names(model: nn.Module) -> frozenset[str]:
    """The names of the arguments of the model's forward."""
    parameters = inspect.signature(model.forward).parameters.values()
    return frozenset(
        p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    )


def check_batch(batch: Any, accepted: Iterable[str], loss: CountedLoss) -> None:
    """Local checks of a batch.

    Args:
        batch: As the caller gave it.
        accepted: The names of the arguments of the model's forward.
        loss: Which may take further ones.

    Raises:
        TypeError: It is no mapping.
        ValueError: It names an argument that the model has not, or its tensors differ in rows.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"the batch is a {type(batch).__name__}; give a mapping of the names of the model's "
            'arguments, such as {"input_ids": ..., "labels": ...}'
        )
    names, of_loss = frozenset(accepted), names_of(loss)
    unknown = [name for name in batch if name not in {*names, *TARGETS, *of_loss}]
    if unknown:
        key = unknown[0]
        raise ValueError(
            f"the batch has {key!r}, which the model's forward does not take (it takes "
            f"{', '.join(sorted(names))}), nor the loss; leave it out, or, where a loss of your "
            f"own needs it, name it there: loss=pyops.parallel.PairLoss(sum, count, "
            f"names={(*of_loss, key)!r})"
        )
    rows = num_rows(dict(batch))
    if rows is None:
        raise ValueError("the batch has no tensor of rows; give tensors [rows, ...]")


def model_arguments(batch: Mapping[str, Any], accepted: frozenset[str]) -> dict[str, Any]:
    """What of a batch the model is called with; labels, and what it does not take, are for the loss
    alone."""
    found = {
        name: value for name, value in batch.items() if name in accepted and name not in TARGETS
    }
    if "use_cache" in accepted:
        found.setdefault("use_cache", False)
    return found


def microbatches(batch: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """The batch in at most `number` parts of about equally many rows."""
    rows = num_rows(dict(batch)) or 0
    return split_batch(dict(batch), max(1, min(number, rows)), rows=rows)
