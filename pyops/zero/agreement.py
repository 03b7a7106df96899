"""What the ranks must have in common before their collectives can match: the model and the
options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from pyops.comm.agreement import gather, ranks_agree
from pyops.mesh import ProcessGroupLike

__all__ = ["RankSetup", "agreed", "check_same_setup"]

T = TypeVar("T")


def agreed(make: Callable[[], T], *, group: ProcessGroupLike) -> T:
    """What `make` returns on this rank. Collective: what it raises on any rank, reading a
    checkpoint, say, is raised on all."""
    with ranks_agree(group):
        return make()


@dataclass(frozen=True)
class RankSetup:
    """What a rank tells the others before a ZeroOptimizer changes anything."""

    model: list[tuple[object, ...]]
    """(name, shape, dtype, whether it is trained) of each parameter and buffer."""

    options: dict[str, str]
    """The options by name, as text: a tensor is its values."""

    secondary_ranks: list[int] | None
    """The ranks of the secondary group; None without one."""

    @classmethod
    def of(
        cls, model: nn.Module, options: Mapping[str, Any], *, secondary_ranks: list[int] | None
    ) -> RankSetup:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        described: list[tuple[object, ...]] = [
            (
                name,
                tuple(t.shape),
                str(t.dtype).removeprefix("torch."),
                "trained" if t.requires_grad else "fixed",
            )
            for name, t in tensors
        ]
        return cls(
            described,
            {key: repr(_plain(value)) for key, value in options.items()},
            secondary_ranks,
        )


def check_same_setup(setup: RankSetup, *, group: ProcessGroupLike) -> list[RankSetup]:
    """Every rank's setup. Collective.

    Raises:
        ValueError: on every rank, naming the first difference from rank 0 in model or options.
    """
    everyone = gather(setup, group=group)
    _check_same_model([each.model for each in everyone])
    _check_same_options([each.options for each in everyone])
    return everyone


def _check_same_model(models: Sequence[list[tuple[object, ...]]]) -> None:
    first = models[0]
    for rank, model in enumerate(models):
        if model == first:
            continue
        pairs = zip(first, model, strict=False)
        found = next(
            (f"rank 0 has {a} where rank {rank} has {b}" for a, b in pairs if a != b),
            f"rank 0 has {len(first)} parameters and buffers, rank {rank} has {len(model)}",
        )
        raise ValueError(
            f"ZeroOptimizer: the ranks' models differ: {found}; build the same model on every rank"
        )


def _check_same_options(options: Sequence[dict[str, str]]) -> None:
    first = options[0]
    for rank, found in enumerate(options):
        for key in sorted(set(first) | set(found)):
            if first.get(key) != found.get(key):
                raise ValueError(
                    f"ZeroOptimizer: {key} is {first.get(key)} on rank 0, {found.get(key)} on "
                    f"rank {rank}; pass the same on every rank"
                )


def _plain(value: Any) -> Any:
    """An option as ranks compare it: a tensor is its values, on whichever device it is."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
