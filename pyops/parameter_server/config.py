"""What a replica and a shard are told: DownpourConfig and ShardConfig."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from pyops.comm.compression.codec import Codec
from pyops.protocols import CollectiveCodec

__all__ = ["DownpourConfig", "ShardConfig", "check_number"]


def check_number(value: object, *, name: str, least: int, none: bool = False) -> None:
    """ValueError for what is no whole number of at least `least` (or None, where that is
    allowed)."""
    if none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        text = " or None" if none else ""
        raise ValueError(f"{name} is {value!r}; give a whole number, {least} or more{text}")


@dataclass(frozen=True)
class DownpourConfig:
    """How a replica exchanges with the shards (Dean et al. 2012, section 4.1)."""

    fetch_every: int = 1
    """n_fetch: steps from one fetch of the parameters to the next."""
    push_every: int = 1
    """n_push: steps from one push of the accrued gradients to the next. The first push carries one
    gradient, as in the paper's pseudo-code, and the others carry n_push."""
    fetch_delay: int = 1
    """Steps from the beginning of a fetch to the one that computes with its parameters; the fetch
    travels meanwhile. 0: the replica waits for its own push and then for the fetch. At most
    fetch_every."""
    local_lr: float = 0.0
    """The rate of the replica's own steps between two fetches; 0: it makes none."""
    mean: bool = False
    """Whether a push is divided by the number of gradients in it; the paper pushes their sum."""
    push_codec: Codec | None = None
    """How pushes are written, with error feedback in the replica; None: as they are."""
    fetch_codec: Codec | None = None
    """How fetches are written, as differences to what the replica has; None: as they are."""
    buffers: str = "refuse"
    """What becomes of buffers with floating-point numbers, such as the statistics of batch norm,
    which have no gradients: "refuse" the model, or "own": each replica keeps its own."""

    def __post_init__(self) -> None:
        check_number(self.fetch_every, name="fetch_every", least=1)
        check_number(self.push_every, name="push_every", least=1)
        check_number(self.fetch_delay, name="fetch_delay", least=0)
        if self.fetch_delay > self.fetch_every:
            raise ValueError(
                f"fetch_delay is {self.fetch_delay}, but the next fetch begins {self.fetch_every} "
                "steps after the one before; give fetch_delay <= fetch_every"
            )
        rate: Any = self.local_lr
        if isinstance(rate, bool) or not isinstance(rate, float | int) or not 0 <= rate < 1e30:
            raise ValueError(f"local_lr is {rate!r}; give a number, 0 or more")
        if self.buffers not in ("refuse", "own"):
            raise ValueError(f'buffers is {self.buffers!r}; give "refuse" or "own"')
        for name in ("push_codec", "fetch_codec"):
            codec = getattr(self, name)
            if codec is not None and (
                not isinstance(codec, Codec) or isinstance(codec, CollectiveCodec)
            ):
                raise ValueError(
                    f"{name} is {codec!r}; give a codec that writes vectors, such as "
                    "pyops.comm.Int8(), or None"
                )


@dataclass(frozen=True)
class ShardConfig:
    """When a shard answers, what it applies, and what it keeps."""

    warm_start: int = 0
    """Pushes of the first replica alone, before the others' first fetch is answered."""
    max_staleness: int | None = None
    """Stale synchronous parallel: a fetch waits while its replica is more than so many pushes
    ahead of the slowest one. None: no bound."""
    drop_after: int | None = None
    """Pushes whose gradients saw parameters of more than so many versions ago are refused and
    counted. None: all are applied."""
    rate_by_staleness: bool = False
    """Whether the rate of a push is divided by 1 + its staleness."""
    snapshot_every: int = 1000
    """Pushes from one snapshot to the next: the most that a shard loses when it is killed."""
    record: bool = False
    """Whether the order of pushes and fetches is kept in `log`, for `replay`."""
    replay: Sequence[tuple[str, int, int]] | None = None
    """The log of an earlier run: pushes and fetches are served in its order, each waiting for its
    turn."""

    def __post_init__(self) -> None:
        check_number(self.warm_start, name="warm_start", least=0)
        check_number(self.max_staleness, name="max_staleness", least=0, none=True)
        check_number(self.drop_after, name="drop_after", least=0, none=True)
        check_number(self.snapshot_every, name="snapshot_every", least=1)
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name in ("rate_by_staleness", "record") and not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; give True or False")


@dataclass(frozen=True)
class ConnectConfig:
    """How long a replica waits for shards."""

    patience: float = 60.0
    """Seconds that it waits for a shard to be there, or to be started again."""
    beat_every: float = 2.0
    """Seconds from one sign of life to the next; a fraction of the shards' lease."""
    shared_memory: bool = True
    """Whether messages to a shard on the same host lie in memory of both, instead of travelling."""

    def __post_init__(self) -> None:
        for name in ("patience", "beat_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not value > 0:
                raise ValueError(f"{name} is {value!r}; give seconds, above 0")
