"""BlockLayout: which blocks of keys each block of queries sees, compressed in both directions.

       key blocks 0 1 2 3        counts[h, i]             how many key blocks row i sees
      query   0   P . . .        indices[h, i, :count]    which, ascending
      block   1   F P . .        full[h, i, :count]       F: every pair of tokens is seen, no test
              2   . F P .        P: causality, or the end of the tokens, is tested inside
              3   F . F P        .: never visited

The forward pass and the gradient of the queries walk rows; the gradients of keys and values walk
columns, so the same three tables stand there for the transpose. Nothing of size queries x keys in
tokens is made, except by `tokens()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyops.ops.attention.block_tables import (
    both_ways,
    check_pairs,
    check_rectangles,
    check_sizes,
    not_later,
    rectangles_of,
    tables_of,
)

__all__ = ["BlockLayout"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout:
    """Blocks of queries by blocks of keys, for all heads alike or for each head its own.

    Made by `from_dense`, `from_pairs` or `from_rectangles`; h counts heads, or is 0 where all are
    alike. Blocks of the layout are visited, and what the operation is told besides (a window,
    documents, causality) is tested within them. A block that reaches beyond the last query or key
    is never full.

    Raises:
        ValueError: When a size or the shape of a table does not fit, TypeError for its dtype.
    """

    block: int
    """Tokens of a block's side, a multiple of 16."""
    num_queries: int
    """Queries, in tokens; the last block may have fewer."""
    num_keys: int
    """Keys, in tokens."""
    causal: bool
    """A query sees no key at a later place, to the token; both are counted from 0."""
    counts: Tensor
    """int32 [H or 1, nq]: how many key blocks a query block sees."""
    indices: Tensor
    """int32 [H or 1, nq, most]: which, ascending; 0 behind the count."""
    full: Tensor
    """bool [H or 1, nq, most]: whether all block x block pairs exist and are seen."""
    column_counts: Tensor
    """int32 [H or 1, nk]: how many query blocks see a key block."""
    column_indices: Tensor
    """int32 [H or 1, nk, most]: which, ascending; 0 behind the count."""
    column_full: Tensor
    """bool [H or 1, nk, most]: as `full`."""

    def __post_init__(self) -> None:
        check_sizes(self.block, self.num_queries, self.num_keys)
        heads = self.counts.shape[0] if self.counts.dim() == 2 else 0
        for side, length in (("", self.num_query_blocks), ("column_", self.num_key_blocks)):
            counts = getattr(self, f"{side}counts")
            most = getattr(self, f"{side}indices").shape[-1:]
            for name, dtype, shape in (
                ("counts", torch.int32, (heads, length)),
                ("indices", torch.int32, (heads, length, *most)),
                ("full", torch.bool, (heads, length, *most)),
            ):
                table = getattr(self, side + name)
                if table.dtype != dtype:
                    raise TypeError(f"{side}{name} must be {dtype}, got {table.dtype}")
                if table.shape != shape or not heads:
                    raise ValueError(
                        f"{side}{name} has the shape {list(table.shape)}, where a layout of "
                        f"{self.num_queries} queries, {self.num_keys} keys and block {self.block} "
                        f"needs [heads or 1, {length}{', most' if name != 'counts' else ''}]; "
                        "make it by from_dense or from_pairs"
                    )
                if table.device != counts.device or counts.device != self.counts.device:
                    raise ValueError(
                        f"{side}{name} is on {table.device} and counts on {self.counts.device}; "
                        "move the whole layout by to(device)"
                    )

    @classmethod
    def from_dense(
        cls,
        visible: Tensor,
        *,
        block: int,
        num_queries: int,
        num_keys: int,
        causal: bool = False,
    ) -> BlockLayout:
        """The layout of a table of blocks.

        Args:
            visible: bool [H or 1, nq, nk], rows are blocks of queries; [nq, nk] for all heads
                alike.
            block: Tokens of a block's side, a multiple of 16.
            num_queries: Queries, in tokens: nq is that over `block`, rounded up.
            num_keys: Keys, in tokens.
            causal: Whether no query sees a later key; blocks that are wholly later fall away.

        Returns:
            The layout, on the device of `visible`.

        Raises:
            ValueError: When sizes or shapes do not fit; TypeError when `visible` is not bool.
        """
        shape = _shape(1, block, num_queries, num_keys)[1:]
        if visible.dtype != torch.bool:
            raise TypeError(f"a table of blocks must be torch.bool, got {visible.dtype}")
        if visible.dim() == 2:
            visible = visible.unsqueeze(0)
        if visible.dim() != 3 or visible.shape[1:] != shape or not visible.shape[0]:
            raise ValueError(
                f"a table of shape {list(visible.shape)} for {num_queries} queries and {num_keys} "
                f"keys in blocks of {block}: expected [heads or 1, {shape[0]}, {shape[1]}]"
            )
        if causal:
            visible = visible & not_later(visible)
        sizes = (block, num_queries, num_keys)
        rows, columns = both_ways(
            visible.reshape(-1).nonzero().squeeze(1),
            visible.transpose(1, 2).reshape(-1).nonzero().squeeze(1),
            (visible.shape[0], *shape),
            _whole(sizes),
            causal=causal,
        )
        return cls(*sizes, causal, *rows, *columns)

    @classmethod
    def from_pairs(
        cls,
        pairs: Tensor,
        *,
        num_heads: int = 1,
        block: int,
        num_queries: int,
        num_keys: int,
        causal: bool = False,
    ) -> BlockLayout:
        """The layout of a list of blocks, without a table of all.

        Args:
            pairs: int64 [n, 3] of (head, query block, key block), in any order; repeated ones count
                once.
            num_heads: Heads of the layout; 1 for all heads alike.
            block, num_queries, num_keys, causal: As for `from_dense`.

        Returns:
            The layout, on the device of `pairs`.

        Raises:
            ValueError: When a size does not fit or a pair is out of range; TypeError when `pairs`
                is not int64.
        """
        shape = _shape(num_heads, block, num_queries, num_keys)
        check_pairs(pairs, shape)
        sizes = (block, num_queries, num_keys)
        return cls._of_rectangles(rectangles_of(pairs), shape, sizes, causal=causal)

    @classmethod
    def from_rectangles(
        cls,
        rectangles: Tensor,
        *,
        num_heads: int = 1,
        block: int,
        num_queries: int,
        num_keys: int,
        causal: bool = False,
    ) -> BlockLayout:
        """The layout of a list of rectangles of blocks, without a table of all.

        Args:
            rectangles: int64 [n, 5] of (head, query block, end, key block, end), each end one
                behind the last block; in any order, and they may overlap.
            num_heads: Heads of the layout; 1 for all heads alike.
            block, num_queries, num_keys, causal: As for `from_dense`.

        Returns:
            The layout, on the device of `rectangles`.

        Raises:
            ValueError: When a size does not fit or a rectangle is out of range; TypeError when
                `rectangles` is not int64.
        """
        shape = _shape(num_heads, block, num_queries, num_keys)
        check_rectangles(rectangles, shape)
        return cls._of_rectangles(rectangles, shape, (block, num_queries, num_keys), causal=causal)

    @classmethod
    def _of_rectangles(
        cls,
        rectangles: Tensor,
        shape: tuple[int, int, int],
        sizes: tuple[int, int, int],
        *,
        causal: bool,
    ) -> BlockLayout:
        rows, columns = tables_of(rectangles, shape, _whole(sizes), causal=causal)
        return cls(*sizes, causal, *rows, *columns)

    @property
    def num_heads(self) -> int:
        """Heads that the tables tell apart; 1 where all are alike."""
        return int(self.counts.shape[0])

    @property
    def num_query_blocks(self) -> int:
        """nq, the last one perhaps not full."""
        return -(-self.num_queries // self.block)

    @property
    def num_key_blocks(self) -> int:
        """nk, the last one perhaps not full."""
        return -(-self.num_keys // self.block)

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.counts.device

    @property
    def density(self) -> float:
        """Visited blocks over all blocks, the mean over heads."""
        all_blocks = self.num_heads * self.num_query_blocks * self.num_key_blocks
        return int(self.counts.sum()) / all_blocks if all_blocks else 0.0

    def __repr__(self) -> str:
        heads = "heads alike" if self.num_heads == 1 else f"{self.num_heads} heads"
        size = f"{self.num_query_blocks} x {self.num_key_blocks} blocks of {self.block}"
        causal = ", causal" if self.causal else ""
        return f"BlockLayout({heads}, {size}{causal}, {self.density:.1%} visited)"

    def dense(self) -> Tensor:
        """The table of blocks: bool [H or 1, nq, nk]."""
        visible = torch.zeros(
            self.num_heads,
            self.num_query_blocks,
            self.num_key_blocks,
            dtype=torch.bool,
            device=self.device,
        )
        head, row, column = self.pairs().unbind(1)
        visible[head, row, column] = True
        return visible

    def tokens(self) -> Tensor:
        """Which query sees which key: bool [H or 1, num_queries, num_keys]; for tests and small
        sizes."""
        seen = self.dense().repeat_interleave(self.block, dim=1)[:, : self.num_queries]
        seen = seen.repeat_interleave(self.block, dim=2)[:, :, : self.num_keys]
        if self.causal:
            queries = torch.arange(self.num_queries, device=self.device)
            keys = torch.arange(self.num_keys, device=self.device)
            seen = seen & (keys <= queries[:, None])
        return seen

    def pairs(self) -> Tensor:
        """The visited blocks, int64 [n, 3] of (head, query block, key block), ascending."""
        counts = self.counts.reshape(-1).long()
        line = torch.arange(counts.numel(), device=self.device).repeat_interleave(counts)
        head, row = line // max(self.num_query_blocks, 1), line % max(self.num_query_blocks, 1)
        slot = torch.arange(line.numel(), device=self.device) - (counts.cumsum(0) - counts)[line]
        return torch.stack([head, row, self.indices[head, row, slot].long()], dim=1)

    def to(self, device: torch.device | str) -> BlockLayout:
        """The same layout with its tables on `device`."""
        return self._with_tables(lambda table: table.to(device))

    def heads(self, first: int, count: int) -> BlockLayout:
        """The layout of `count` heads from head `first` on; the same where all heads are alike.

        Raises:
            ValueError: When there are no such heads.
        """
        if first < 0 or count < 1 or (self.num_heads > 1 and first + count > self.num_heads):
            raise ValueError(
                f"heads {first} to {first + count - 1} of a layout with {self.num_heads}; give a "
                "first head of 0 or more and a count of 1 or more that end within it"
            )
        if self.num_heads == 1:
            return self
        return self._with_tables(lambda table: table[first : first + count])

    def __or__(self, other: BlockLayout) -> BlockLayout:
        """What one of both sees.

        Raises:
            ValueError: When they are of other sizes, of another causality, or of other heads.
        """
        for name in ("block", "num_queries", "num_keys", "causal", "device"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"a union of layouts with {name} {getattr(self, name)} and "
                    f"{getattr(other, name)}; make both with the same"
                )
        if 1 not in (self.num_heads, other.num_heads) and self.num_heads != other.num_heads:
            raise ValueError(
                f"a union of layouts with {self.num_heads} and {other.num_heads} heads; make both "
                "with the same number, or one with all heads alike"
            )
        heads = max(self.num_heads, other.num_heads)
        parts = [
            layout._with_tables(lambda table: table.expand(heads, *table.shape[1:])).pairs()
            for layout in (self, other)
        ]
        return BlockLayout.from_pairs(
            torch.cat(parts),
            num_heads=heads,
            block=self.block,
            num_queries=self.num_queries,
            num_keys=self.num_keys,
            causal=self.causal,
        )

    def to_block_mask(self) -> Any:
        """The same as a `BlockMask` of torch's `flex_attention`, with its `mask_mod`."""
        from torch.nn.attention.flex_attention import BlockMask

        visible, block, alike, causal = self.dense(), self.block, self.num_heads == 1, self.causal

        def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = visible[torch.zeros_like(head) if alike else head, query // block, key // block]
            return seen & (query >= key) if causal else seen

        def listed(side: str, width: int) -> list[Tensor]:
            counts, indices, full = (
                getattr(self, side + table) for table in ("counts", "indices", "full")
            )
            visited = torch.arange(indices.shape[-1], device=self.device) < counts[..., None]
            tables = []
            for chosen in (visited & ~full, visited & full):
                # torch reads the number of columns off the width of a table.
                wide = torch.zeros(*counts.shape, width, dtype=torch.int32, device=self.device)
                slot = chosen.cumsum(-1) - 1
                at = chosen.nonzero(as_tuple=True)
                wide[at[0], at[1], slot[at]] = indices[at]
                tables += [chosen.sum(-1, dtype=torch.int32)[None], wide[None]]
            return tables

        tables: Any = (
            (self.num_queries, self.num_keys),
            *listed("", self.num_key_blocks),
            *listed("column_", self.num_query_blocks),
            (block, block),
            mask,
        )
        return BlockMask(*tables)

    def _with_tables(self, change: Any) -> BlockLayout:
        rows = (change(table) for table in (self.counts, self.indices, self.full))
        columns = (
            change(table) for table in (self.column_counts, self.column_indices, self.column_full)
        )
        return BlockLayout(
            self.block, self.num_queries, self.num_keys, self.causal, *rows, *columns
        )


def _shape(num_heads: int, block: int, num_queries: int, num_keys: int) -> tuple[int, int, int]:
    """Heads, and blocks of both sides; raises for a size that no layout can have."""
    check_sizes(block, num_queries, num_keys)
    return num_heads, -(-num_queries // block), -(-num_keys // block)


def _whole(sizes: tuple[int, int, int]) -> tuple[int, int]:
    """Blocks of both sides that have all their tokens, of (block, num_queries, num_keys)."""
    return sizes[1] // sizes[0], sizes[2] // sizes[0]
