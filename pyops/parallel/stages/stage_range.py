"""StageRange: which blocks a forward of the model computes, and the gates at the blocks that see to
it.

    stage 1 of 3, blocks 2 and 3 of 6

    embeddings   zeros of their shape          the model's own code runs up to the entry of the last
    block 0, 1   hidden states pass            block of the stage before, for masks and rotary
    block 2      <- received values            tables
    block 3      computed; an argument that was replaced for block 2 and comes again, such as the
                 output of an encoder, is replaced again
    block 4      StageExit, with the values that stage 2 is sent
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pyops.parallel.stages.block_record import BlockRecord
from pyops.tensor_parallel.convert.region_hooks import SplitTokens
from pyops.torch_private import call_instead

__all__ = ["BlockGate", "StageExit", "StageRange"]


class StageExit(Exception):
    """Ends a forward of the model at the entry of the next stage's first block.

    Attributes:
        values: What the next stage is sent.
    """

    def __init__(self, values: tuple[Tensor, ...]) -> None:
        super().__init__("a stage ended")
        self.values = values


class StageRange:
    """The blocks [begin, end) that the forward at hand computes; all of them outside of `within`.

    Attributes:
        begin: The first block; 0 for the stage that has the model's first modules.
        end: The block behind the last one; None for the stage that has the model's last modules.
    """

    def __init__(self) -> None:
        self.begin: int = 0
        self.end: int | None = None
        self._received: Sequence[Tensor] | None = None
        self._instead: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def within(
        self, begin: int, end: int | None, received: Sequence[Tensor] | None
    ) -> Iterator[None]:
        """Within, a forward computes these blocks.

        Args:
            begin, end: See the attributes.
            received: What the stage before has sent; None for the first stage.
        """
        self.begin, self.end, self._received = begin, end, received
        try:
            yield
        finally:
            self.begin, self.end, self._received = 0, None, None
            self._instead = {}

    def arguments(
        self, index: int, record: BlockRecord, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of block `index`, with what the stage before has sent.

        Args:
            index: Of the block, within this stage or at its end.
            record: Of the block.
            args, kwargs: As the model's code gives them.
        """
        if self._received is None:
            return args, kwargs
        values = record.taken(args, kwargs)
        if index == self.begin:
            # What was replaced is kept beside what replaces it, so that its id stays its own.
            for value, sent in zip(values, self._received, strict=True):
                if isinstance(value, Tensor):
                    self._instead[id(value)] = (value, sent)
            return record.replaced(args, kwargs, self._received)
        if not any(id(value) in self._instead for value in values):
            return args, kwargs
        return record.replaced(
            args, kwargs, [self._instead.get(id(value), (value, value))[1] for value in values]
        )


class BlockGate:
    """Stands before a block: lets its call through, or answers in its place.

    Args:
        block: The block, which is called through this gate from now on.
        index: Its number among the model's blocks.
        record: How it is called.
        stage_range: Of the model.
        split: What shares out the tokens before it, under sequence parallelism.
    """

    def __init__(
        self,
        block: nn.Module,
        index: int,
        record: BlockRecord,
        stage_range: StageRange,
        split: SplitTokens | None = None,
    ) -> None:
        self.index, self.record, self.stage_range = index, record, stage_range
        self._block, self._split = block, split
        self._call: Callable[..., Any] = call_instead(block, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage = self.stage_range
        if self.index < stage.begin:
            if self._split is not None:  # by whose count later blocks put tokens together
                self._split.note(self._block, args, kwargs)
            return self.record.passed(args, kwargs)
        args, kwargs = stage.arguments(self.index, self.record, args, kwargs)
        if self.index == stage.end:
            raise StageExit(self.record.taken(args, kwargs))
        return self._call(*args, **kwargs)
