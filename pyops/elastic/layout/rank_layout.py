"""Layout: which rank holds which layers of a model, how many of them are frozen, and who is idle.

    ranks      0 1 2 3 | 4 5 6 7 |  8         9 ranks, 4 stages, 2 replicas
    replica    0 0 0 0 | 1 1 1 1 | idle
    stage      0 1 2 3 | 0 1 2 3 |
    layers    [boundaries[stage], boundaries[stage + 1])       the frozen ones are the first, all of
                                                               them on stage 0

    ranks      0 1   2 3 | 4 5   6 7          8 ranks, 2 stages, 2 replicas, context 2: neighbors
    part       0 1   0 1 | 0 1   0 1          hold the same layers, and other tokens of the same
                                              samples, in every layout; with tensor 2 they share
                                              the weights of the layers, and see the same samples

Plain data: nothing here talks to another rank. `pyops.elastic.transition` goes from one layout to
the next.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """Rank r is stage r % stages of replica r // stages, and idle from stages * replicas on; with a
    context of c ranks, neighbors r c to r c + c - 1 are that together, and so are those of tensor.

    ValueError, which names it, for what makes no sense. The last layer, the head, is never frozen;
    stage 0 may be the frozen prefix alone.

    Attributes:
        ranks: How many there are, idle ones too.
        boundaries: The first layer of each stage, and the number of layers.
        frozen: How many layers, not blocks, are frozen.
        micro_batches: Of a step of each pipeline.
        context: How many neighbors share out the tokens of each sample.
        tensor: How many neighbors share the weights of the same layers.
    """

    ranks: int
    stages: int
    replicas: int
    boundaries: tuple[int, ...]
    frozen: int = 0
    micro_batches: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        for what in ("ranks", "stages", "replicas", "micro_batches", "context", "tensor"):
            value = getattr(self, what)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{what} is {value!r}; it must be a whole number, 1 or more")
        if self.active > self.ranks:
            raise ValueError(
                f"{self._needed} need {self.active} ranks, but there are {self.ranks}; take fewer "
                "of either"
            )
        cut = self.boundaries
        rising = all(isinstance(b, int) for b in cut) and all(
            a < b for a, b in itertools.pairwise(cut)
        )
        if len(cut) != self.stages + 1 or cut[0] != 0 or not rising:
            raise ValueError(
                f"boundaries is {cut}; expected {self.stages + 1} rising whole numbers "
                "from 0 to the number of layers: the "
                f"first layer of each of the {self.stages} stages, and the number of layers"
            )
        if (
            isinstance(self.frozen, bool)
            or not isinstance(self.frozen, int)
            or not 0 <= self.frozen < cut[-1]
        ):
            raise ValueError(
                f"frozen is {self.frozen!r}; it must be a whole number from 0 to "
                f"{cut[-1] - 1}: of {cut[-1]} layers the last "
                "is never frozen"
            )
        if self.frozen > cut[1]:
            raise ValueError(
                f"{self.frozen} layers are frozen, but stage 0 ends with layer "
                f"{cut[1] - 1}; the frozen prefix is not cut: "
                f"boundaries[1] must be {self.frozen} or more"
            )

    @property
    def layer_count(self) -> int:
        """Layers of the model."""
        return self.boundaries[-1]

    @property
    def active(self) -> int:
        """How many ranks have something to do: the first ones."""
        return self.stages * self.replicas * self.parts

    @property
    def parts(self) -> int:
        """How many neighbors are one stage of one replica together."""
        return self.context * self.tensor

    @property
    def _needed(self) -> str:
        each = f" of {self.parts} ranks" if self.parts > 1 else ""
        return f"{self.replicas} replicas of {self.stages} stages{each}"

    def is_active(self, rank: int) -> bool:
        """Whether the rank holds layers."""
        return self._checked(rank) < self.active

    def replica(self, rank: int) -> int:
        """The replica of an active rank.

        Raises:
            ValueError: For an idle one.
        """
        return self._active(rank) // self.parts // self.stages

    def stage(self, rank: int) -> int:
        """The stage of an active rank.

        Raises:
            ValueError: For an idle one.
        """
        return self._active(rank) // self.parts % self.stages

    def is_first(self, rank: int) -> bool:
        """Whether an active rank is the first of those that hold its layers, and of their weights
        the same part.

        Raises:
            ValueError: For an idle one.
        """
        return self._active(rank) == self.dp_ranks(self.stage(rank), rank % self.tensor)[0]

    def layers(self, rank: int) -> range:
        """The layers that the rank holds, frozen ones too; of an idle one none."""
        if not self.is_active(rank):
            return range(0)
        stage = self.stage(rank)
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    def pp_ranks(self, replica: int, part: int = 0) -> tuple[int, ...]:
        """The ranks of a replica's pipeline, by stage; where it has parts, of one."""
        if not 0 <= replica < self.replicas:
            raise ValueError(
                f"there is no replica {replica!r}; they are numbered from 0 to {self.replicas - 1}"
            )
        if not 0 <= part < self.parts:
            raise ValueError(
                f"there is no part {part!r}; they are numbered from 0 to {self.parts - 1}"
            )
        first, last = (n * self.stages * self.parts for n in (replica, replica + 1))
        return tuple(range(first + part, last, self.parts))

    def tp_ranks(self, rank: int) -> tuple[int, ...]:
        """The neighbors that share weights with an active rank, itself included.

        Raises:
            ValueError: For an idle one.
        """
        first = self._active(rank) // self.tensor * self.tensor
        return tuple(range(first, first + self.tensor))

    def cp_ranks(self, rank: int) -> tuple[int, ...]:
        """The neighbors that share out the tokens of an active rank's samples, itself included.

        Raises:
            ValueError: For an idle one.
        """
        first = self._active(rank) // self.parts * self.parts + rank % self.tensor
        return tuple(range(first, first + self.parts, self.tensor))

    def dp_ranks(self, stage: int, part: int = 0) -> tuple[int, ...]:
        """The ranks that hold the same stage, by replica, and by part of the context.

        Args:
            stage: Of a pipeline.
            part: Of the weights, where `tensor` ranks share them.
        """
        if not 0 <= stage < self.stages:
            raise ValueError(
                f"there is no stage {stage!r}; they are numbered from 0 to {self.stages - 1}"
            )
        return tuple(
            rank
            for rank in range(self.active)
            if self.stage(rank) == stage and rank % self.tensor == part
        )

    def holders(self, layer: int) -> tuple[int, ...]:
        """The ranks that hold a layer, by replica."""
        if not 0 <= layer < self.layer_count:
            raise ValueError(
                f"there is no layer {layer!r}; they are numbered from 0 to {self.layer_count - 1}"
            )
        return self.dp_ranks(next(s for s in range(self.stages) if layer < self.boundaries[s + 1]))

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise ValueError(
                f"there is no rank {rank!r}; they are numbered from 0 to {self.ranks - 1}"
            )
        return rank

    def _active(self, rank: int) -> int:
        if not self.is_active(rank):
            raise ValueError(
                f"rank {rank} is idle: {self._needed} are ranks 0 to {self.active - 1}"
            )
        return rank
