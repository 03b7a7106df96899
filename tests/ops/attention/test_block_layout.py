"""BlockLayout: both directions of its tables against the table of tokens they stand for, and what
it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from pyops.ops.attention import BlockLayout, block_tables

SIZES = [(100, 150), (160, 64), (64, 64), (16, 1), (15, 40)]


def random_blocks(heads: int, queries: int, keys: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(queries + keys)
    shape = (heads, -(-queries // 16), -(-keys // 16))
    return (torch.rand(shape, generator=generator) < 0.4).to(device)


def seen_tokens(blocks: Tensor, queries: int, keys: int, *, causal: bool) -> list[list[list[bool]]]:
    table = blocks.tolist()
    return [
        [
            [head[t // 16][s // 16] and (s <= t or not causal) for s in range(keys)]
            for t in range(queries)
        ]
        for head in table
    ]


def listed(counts: Tensor, indices: Tensor, full: Tensor) -> list[dict[tuple[int, int], bool]]:
    """Of each head {(row, column): full}, in the order of the tables, which must ascend."""
    heads = []
    for head in range(counts.shape[0]):
        found = {}
        for row, count in enumerate(counts[head].tolist()):
            columns = indices[head, row, :count].tolist()
            assert columns == sorted(set(columns))
            found |= dict(
                zip(((row, c) for c in columns), full[head, row, :count].tolist(), strict=True)
            )
        heads.append(found)
    return heads


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("heads", [1, 3])
def test_tables_say_what_the_tokens_see(
    heads: int, queries: int, keys: int, causal: bool, device: torch.device
):
    blocks = random_blocks(heads, queries, keys, device)
    layout = BlockLayout.from_dense(
        blocks, block=16, num_queries=queries, num_keys=keys, causal=causal
    )
    tokens = seen_tokens(blocks, queries, keys, causal=causal)
    assert layout.tokens().tolist() == tokens
    rows = listed(layout.counts, layout.indices, layout.full)
    columns = listed(layout.column_counts, layout.column_indices, layout.column_full)
    visited = 0
    for head, seen in enumerate(tokens):
        expected = {}
        for i in range(blocks.shape[1]):
            for j in range(blocks.shape[2]):
                pairs = [
                    seen[t][s]
                    for t in range(i * 16, min(i * 16 + 16, queries))
                    for s in range(j * 16, min(j * 16 + 16, keys))
                ]
                if any(pairs):
                    expected[i, j] = sum(pairs) == 256
        assert rows[head] == expected
        assert {(i, j): full for (j, i), full in columns[head].items()} == expected
        visited += len(expected)
    assert layout.density == pytest.approx(visited / blocks.numel())
    assert layout.device.type == layout.column_full.device.type == device.type


def test_a_literal():
    layout = BlockLayout.from_dense(
        torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1]], dtype=torch.bool),
        block=16,
        num_queries=48,
        num_keys=48,
        causal=True,
    )
    assert layout.counts.tolist() == [[1, 2, 2]]
    assert layout.indices.tolist() == [[[0, 0], [0, 1], [0, 2]]]
    assert layout.full.tolist() == [[[False, False], [True, False], [True, False]]]
    assert layout.column_counts.tolist() == [[3, 1, 1]]
    assert layout.column_indices.tolist() == [[[0, 1, 2], [1, 0, 0], [2, 0, 0]]]
    assert layout.column_full.tolist() == [
        [[False, True, True], [False, False, False], [False, False, False]]
    ]
    assert {t.dtype for t in (layout.counts, layout.column_indices)} == {torch.int32}


def test_a_layout_is_shown_in_a_line():
    assert repr(two_by_three(causal=True)) == (
        "BlockLayout(2 heads, 2 x 3 blocks of 16, causal, 50.0% visited)"
    )
    assert repr(two_by_three(shape=(1, 2, 3))) == (
        "BlockLayout(heads alike, 2 x 3 blocks of 16, 100.0% visited)"
    )


def equal(one: BlockLayout, other: BlockLayout) -> bool:
    names = ("counts", "indices", "full", "column_counts", "column_indices", "column_full")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_pairs_in_any_order_and_repeated_give_the_same_tables(
    causal: bool, with_kernels: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    if not with_kernels:
        monkeypatch.setattr(block_tables, "native", lambda: None)
    for sparse in (1, 40):  # without kernels by a table, and by sorting
        blocks = random_blocks(3, 1000, 900, device)
        blocks &= (torch.arange(blocks.numel(), device=device) % sparse == 0).view_as(blocks)
        pairs = blocks.nonzero()
        assert (16 * len(pairs) >= blocks.numel()) == (sparse == 1)
        order = torch.randperm(len(pairs), device=device)
        sizes: dict[str, Any] = {
            "block": 16,
            "num_queries": 1000,
            "num_keys": 900,
            "causal": causal,
        }
        dense = BlockLayout.from_dense(blocks, **sizes)
        listed_pairs = torch.cat([pairs, pairs[: len(pairs) // 8]])[
            torch.cat([order, torch.arange(len(pairs) // 8, device=device)])
        ]
        built = BlockLayout.from_pairs(listed_pairs, num_heads=3, **sizes)
        assert equal(dense, built)
        assert torch.equal(BlockLayout.from_dense(built.dense(), **sizes).indices, dense.indices)


def random_rectangles(heads: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Some empty, some of one block, some over many words and strips of the builder."""
    generator = torch.Generator().manual_seed(rows)

    def span(limit: int) -> Tensor:
        first = torch.randint(limit + 1, (60,), generator=generator)
        width = torch.randint(limit, (60,), generator=generator) // torch.tensor([1, 40]).repeat(30)
        return torch.stack([first, (first + width).clamp(max=limit)], dim=1)

    head = torch.randint(heads, (60, 1), generator=generator)
    return torch.cat([head, span(rows), span(columns)], dim=1).to(device)


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(2075, 3190), (3190, 1024), (40, 2049)])
def test_rectangles_are_their_blocks(
    queries: int,
    keys: int,
    causal: bool,
    with_kernels: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
):
    if not with_kernels:
        monkeypatch.setattr(block_tables, "native", lambda: None)
    sizes: dict[str, Any] = {"block": 16, "num_queries": queries, "num_keys": keys}
    rows, columns = -(-queries // 16), -(-keys // 16)
    rectangles = random_rectangles(3, rows, columns, device)
    blocks = torch.zeros(3, rows, columns, dtype=torch.bool, device=device)
    for h, r, r_end, c, c_end in rectangles.tolist():
        blocks[h, r:r_end, c:c_end] = True
    assert 0.1 < blocks.float().mean() < 0.95
    dense = BlockLayout.from_dense(blocks, causal=causal, **sizes)
    built = BlockLayout.from_rectangles(rectangles, num_heads=3, causal=causal, **sizes)
    assert equal(dense, built)
    few = BlockLayout.from_rectangles(rectangles[:2], num_heads=3, causal=causal, **sizes)
    blocks.zero_()
    for h, r, r_end, c, c_end in rectangles[:2].tolist():
        blocks[h, r:r_end, c:c_end] = True
    assert equal(BlockLayout.from_dense(blocks, causal=causal, **sizes), few)


def test_a_long_window_is_built_without_a_table_of_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BlockLayout, "from_dense", None)
    row = torch.arange(1024)[:, None]
    column = row + torch.arange(-4, 1)
    pairs = torch.stack([torch.zeros_like(column), row.expand_as(column), column], dim=-1)
    layout = BlockLayout.from_pairs(
        pairs[column >= 0], block=64, num_queries=65536, num_keys=65536, causal=True
    )
    assert layout.counts.tolist() == [[min(i, 4) + 1 for i in range(1024)]]
    assert layout.column_counts.tolist() == [[min(1023 - i, 4) + 1 for i in range(1024)]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_torchs_block_mask_says_the_same(heads: int, causal: bool):
    blocks = random_blocks(heads, 100, 150, torch.device("cpu"))
    layout = BlockLayout.from_dense(blocks, block=16, num_queries=100, num_keys=150, causal=causal)
    mask = layout.to_block_mask()
    # By its function, which flex_attention runs without a compiler, and by its tables.
    seen = create_mask(mask.mask_mod, 1, 3, 100, 150, device="cpu")[0]
    assert torch.equal(seen, layout.tokens().expand(3, -1, -1))
    assert torch.equal(mask.to_dense()[0].bool(), layout.dense())
    turned = BlockMask.from_kv_blocks(
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
        BLOCK_SIZE=16,
    )
    for kind in ("q", "full_q"):
        counts = getattr(mask, f"{kind}_num_blocks")
        theirs, ours = getattr(turned, f"{kind}_indices"), getattr(mask, f"{kind}_indices")
        assert torch.equal(getattr(turned, f"{kind}_num_blocks"), counts)
        slots = torch.arange(ours.shape[-1]) < counts[..., None]
        assert torch.equal(ours[slots], theirs[slots])
    assert mask.full_kv_num_blocks.any()
    assert mask.kv_num_blocks.any()


def test_union_and_heads(device: torch.device):
    one, other = (random_blocks(3, n, 150, device) for n in (100, 101))
    sizes: dict[str, Any] = {"block": 16, "num_queries": 100, "num_keys": 150}
    layouts = [BlockLayout.from_dense(b, **sizes) for b in (one, other)]
    assert torch.equal((layouts[0] | layouts[1]).dense(), one | other)
    alike = BlockLayout.from_dense(other[:1], **sizes)
    assert torch.equal((layouts[0] | alike).dense(), one | other[:1])
    assert torch.equal(layouts[0].heads(1, 2).dense(), one[1:])
    assert torch.equal(layouts[0].heads(1, 2).column_counts, layouts[0].column_counts[1:])
    assert alike.heads(5, 2) is alike


@pytest.mark.parametrize(("queries", "keys"), [(0, 20), (20, 0), (0, 0)])
def test_nothing_to_see(queries: int, keys: int):
    for layout in (
        BlockLayout.from_dense(
            torch.ones(1, -(-queries // 16), -(-keys // 16), dtype=torch.bool),
            block=16,
            num_queries=queries,
            num_keys=keys,
        ),
        BlockLayout.from_pairs(
            torch.zeros(0, 3, dtype=torch.int64), block=16, num_queries=queries, num_keys=keys
        ),
    ):
        assert layout.tokens().shape == (1, queries, keys)
        assert layout.density == 0.0


def two_by_three(**changes: Any) -> BlockLayout:
    arguments: dict[str, Any] = {"block": 16, "num_queries": 32, "num_keys": 48}
    blocks = torch.ones(changes.pop("shape", (2, 2, 3)), dtype=changes.pop("dtype", torch.bool))
    return BlockLayout.from_dense(blocks, **(arguments | changes))


def pairs_of(*pairs: tuple[int, int, int], dtype: torch.dtype = torch.int64) -> BlockLayout:
    return BlockLayout.from_pairs(
        torch.tensor(pairs, dtype=dtype), num_heads=2, block=16, num_queries=32, num_keys=48
    )


def rectangle_of(*sides: int, dtype: torch.dtype = torch.int64) -> BlockLayout:
    return BlockLayout.from_rectangles(
        torch.tensor([sides], dtype=dtype), num_heads=2, block=16, num_queries=32, num_keys=48
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: two_by_three(block=24), "block is 24; it must be a multiple of 16"),
        (lambda: two_by_three(block=0), "block is 0; it must be a multiple of 16"),
        (lambda: two_by_three(num_keys=-1), "num_keys is -1; it must be a number of tokens"),
        (lambda: two_by_three(num_queries=33), "[2, 2, 3] for 33 queries and 48 keys"),
        (lambda: two_by_three(num_keys=32), "expected [heads or 1, 2, 2]"),
        (lambda: two_by_three(shape=(0, 2, 3)), "expected [heads or 1, 2, 3]"),
        (lambda: two_by_three(dtype=torch.int64), "must be torch.bool, got torch.int64"),
        (lambda: pairs_of((0, 0, 3)), "key block 3 of a layout with 3"),
        (lambda: pairs_of((0, -1, 0)), "query block -1 of a layout with 2"),
        (lambda: pairs_of((2, 0, 0)), "head 2 of a layout with 2"),
        (lambda: pairs_of((0, 0, 0), dtype=torch.int32), "must be torch.int64, got torch.int32"),
        (
            lambda: rectangle_of(2, 0, 1, 0, 1),
            "head 2 of a rectangle, in a layout of 2 heads and 2",
        ),
        (lambda: rectangle_of(0, 0, 3, 0, 1), "end of query blocks 3 of a rectangle"),
        (lambda: rectangle_of(0, 0, 1, -1, 1), "key block -1 of a rectangle"),
        (lambda: rectangle_of(0, 0, 1, 0, 4), "must be 0 or more and at most 3"),
        (lambda: rectangle_of(0, 0, 1), "have the shape [1, 3]; expected [n, 5]"),
        (lambda: rectangle_of(0, 0, 1, 0, 1, dtype=torch.int32), "torch.int64, got torch.int32"),
        (lambda: two_by_three().heads(1, 2), "heads 1 to 2 of a layout with 2"),
        (lambda: two_by_three() | two_by_three(causal=True), "with causal False and True"),
        (lambda: two_by_three() | two_by_three(shape=(3, 2, 3)), "with 2 and 3 heads"),
    ],
)
def test_refused(make: Callable[[], Any], message: str):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()


def test_tables_that_do_not_fit_are_refused():
    made = two_by_three()
    fields = {name: getattr(made, name) for name in made.__dataclass_fields__}
    for name, table, message in (
        ("counts", made.counts.long(), "counts must be torch.int32, got torch.int64"),
        ("full", made.full[:1], "full has the shape [1, 2, 3]"),
        ("column_indices", made.column_indices[:, :2], "column_indices has the shape [2, 2, 2]"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            BlockLayout(**(fields | {name: table}))
