"""ModelLayout: in which order a model calls its blocks, what goes between them, and which of its
other modules are called where.

    slot 0    encoder.embed_tokens                     before the first block
              encoder.block.0 ... encoder.block.5
    slot 1    encoder.final_layer_norm, decoder.embed_tokens
              decoder.block.0 ... decoder.block.5
    slot 2    decoder.final_layer_norm, lm_head

A stage ends where the next stage's first block is entered, so slot k belongs to the stage of the
last block of list k, and slot 0 to the first stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyops.parallel.stages.block_record import BlockRecord

__all__ = ["BlockList", "ModelLayout"]


@dataclass(frozen=True)
class BlockList:
    """One list of blocks, such as the encoder's."""

    name: str
    """Of the ModuleList in the model."""

    length: int
    """How many blocks it has."""

    first: BlockRecord
    """How its first block is called."""

    later: BlockRecord
    """How each other block is called."""


@dataclass(frozen=True)
class ModelLayout:
    """What is known of a model before it is cut into stages."""

    lists: tuple[BlockList, ...]
    """The lists of blocks, in the order of their calls."""

    slots: dict[str, tuple[int, ...]]
    """Of each module outside of the blocks that has parameters of its own, the slots in which it is
    called; none for one that no forward calls."""

    @property
    def num_blocks(self) -> int:
        """Of all lists."""
        return sum(each.length for each in self.lists)

    def blocks(self) -> Iterator[tuple[str, BlockRecord]]:
        """(name, record) of each block, in the order of their calls."""
        for each in self.lists:
            for i in range(each.length):
                yield f"{each.name}.{i}", each.later if i else each.first

    def last_blocks(self) -> list[int]:
        """The number of the last block of each list."""
        ends, total = [], 0
        for each in self.lists:
            total += each.length
            ends.append(total - 1)
        return ends

    def modules_of(self, begin: int, end: int | None) -> list[str]:
        """The names of the modules that a stage of the blocks [begin, end) needs.

        Args:
            begin: The first block.
            end: The block behind the last one; None for the stage that ends the model.
        """
        last, names = self.last_blocks(), [name for name, _ in self.blocks()]
        stop = len(names) if end is None else end
        own_slots = {slot + 1 for slot, block in enumerate(last) if begin <= block < stop}
        if begin == 0:
            own_slots.add(0)
        if end is None:
            own_slots.add(len(self.lists))
        found = names[begin:stop]
        for name, slots in self.slots.items():
            if own_slots.intersection(slots) or (not slots and end is None):
                found.append(name)
        return found
