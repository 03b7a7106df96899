"""Which rank gives whose state: of all snapshots that ranks see, those of the newest step that is
whole.

    rank 0 sees   step 30 of rank 0, step 20 of ranks 0 and 1       20 is whole: rank 0 gives its
    rank 1 sees   step 20 of ranks 0 and 1                          own state, rank 1 its own
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyops.checkpoint.memory.snapshot import Snapshot, rank_folder

__all__ = ["Claim", "claims_of", "newest"]


@dataclass(frozen=True)
class Claim:
    """That a rank sees a snapshot.

    Attributes:
        step, attempt, world, source: As its header says; source is whose state it is.
        seen_by: The rank.
        place: Machine and filesystem.
        folder: The snapshot's.
    """

    step: int
    attempt: int
    world: int
    source: int
    seen_by: int
    place: tuple[str, int]
    folder: str

    @property
    def preference(self) -> tuple[bool, bool, int, str]:
        """A rank gives its own state, and its own copy of it, before a neighbor's is asked for."""
        own_folder = Path(self.folder).parent.name == rank_folder(self.source)
        return not own_folder, self.seen_by != self.source, self.seen_by, self.folder


def newest(claims: Sequence[Claim], *, newer_than: int) -> list[Claim]:
    """Of each rank's state of the newest step that is whole, who gives it: the same on every rank,
    which all have the same claims.

    States of one step belong together if one attempt of the run has saved them: another may have
    come there with other numbers, or on another number of ranks.

    Args:
        claims: Of all ranks.
        newer_than: A step; those up to it are not wanted.
    """
    saves = {(each.step, each.attempt, each.world) for each in claims if each.step > newer_than}
    for save in sorted(saves, reverse=True):
        givers: dict[int, Claim] = {}
        for claim in sorted(claims, key=lambda each: each.preference):
            if (claim.step, claim.attempt, claim.world) == save:
                givers.setdefault(claim.source, claim)
        if len(givers) == save[2]:
            return [givers[rank] for rank in sorted(givers)]
    return []


def claims_of(
    snapshots: Iterable[Snapshot], *, seen_by: int, place: tuple[str, int]
) -> list[Claim]:
    return [
        Claim(
            each.header.step,
            each.header.attempt,
            each.header.world,
            each.header.rank,
            seen_by,
            place,
            str(each.folder),
        )
        for each in snapshots
    ]
