"""Tiles: every element once, no region overlaps another, and what is in a store is what was put
there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyops.offload.stores import DiskStore, HostStore
from pyops.offload.tiles import plan_tiles
from pyops.ops.library import native

pytestmark = pytest.mark.cpu_only

F32, BF16 = torch.float32, torch.bfloat16
STATES = [
    {},
    {"exp_avg": F32},
    {"exp_avg": BF16, "exp_avg_sq": BF16, "master": F32},
    {"exp_avg": F32, "exp_avg_sq": F32},
]


def test_a_plan_one_can_check_by_hand():
    tiles = plan_tiles([(20_000, STATES[3]), (3, STATES[1]), (0, STATES[1])], tile_bytes=1 << 16)
    found = [[(s.parameter, s.start, s.stop) for s in tile.segments] for tile in tiles]
    assert found == [[(0, 0, 8192)], [(0, 8192, 16_384)], [(0, 16_384, 20_000), (1, 0, 3)]]
    assert [(tile.offset, tile.nbytes) for tile in tiles] == [
        (0, 65_536),
        (65_536, 65_536),
        (131_072, 32_768),
    ]
    last, short = tiles[2].segments
    assert [last.fields[n].start for n in ("exp_avg", "exp_avg_sq")] == [
        0,
        14_464,
    ]  # 3616 * 4, a multiple of 64
    assert short.fields["exp_avg"].start == 14_464 + 14_464


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 63, 1024, 5000, 70_000, 300_000]), st.sampled_from(STATES)
        ),
        max_size=8,
    ),
    st.sampled_from([1 << 16, 100_000, 1 << 20]),
)
def test_every_element_has_one_place(parameters, tile_bytes):
    tiles = plan_tiles(parameters, tile_bytes=tile_bytes)
    ends = [0] * len(parameters)
    offset = 0
    for tile in tiles:
        assert tile.offset == offset
        assert tile.nbytes % 4096 == 0
        assert tile.nbytes <= tile_bytes + 4096 * 13 + 64 * 3 * len(tile.segments), (
            "about tile_bytes, and a cut at most"
        )
        offset += tile.nbytes
        places: list[tuple[int, int]] = []
        for segment in tile.segments:
            assert segment.start == ends[segment.parameter]
            ends[segment.parameter] = segment.stop
            assert set(segment.fields) == set(parameters[segment.parameter][1])
            places += [
                (f.start, f.start + segment.numel * f.dtype.itemsize)
                for f in segment.fields.values()
            ]
        places.sort()
        assert all(start % 64 == 0 for start, _ in places)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places)), (
            "no byte has two owners"
        )
        assert not places or places[-1][1] <= tile.nbytes
    assert ends == [numel for numel, _ in parameters]


@pytest.mark.skipif(native() is None, reason="built without kernels")
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_store_keeps_what_a_visit_leaves(tmp_path, kind):
    tiles = plan_tiles([(100_000, STATES[1])], tile_bytes=1 << 16)
    assert len(tiles) > 5
    store = (
        HostStore(tiles, pin_memory=False)
        if kind == "host"
        else DiskStore(tiles, str(tmp_path), pin_memory=False)
    )
    numbers = list(range(len(tiles)))
    for number, region in store.visit(numbers, fresh=set(numbers)):
        region.fill_(number + 1)
    for number, region in store.visit(numbers[::-2], fresh=set()):
        assert bool((region == number + 1).all())
        region += 10
    with pytest.raises(KeyError):
        for number, region in store.visit(numbers, fresh=set()):
            region.fill_(99)
            if number == 2:
                raise KeyError
    changed = {n + 1 + 10 * (n % 2 == numbers[-1] % 2) for n in numbers[3:]}
    for number, region in store.visit(numbers[3:], fresh=set()):
        assert bool((region == region[0]).all())
        assert int(region[0]) in changed, number
    out = torch.empty(100, dtype=torch.uint8)
    store.read(0, 4, out)
    assert bool((out == 99).all())
    store.write(4, 8, torch.arange(5, dtype=torch.uint8))
    store.read(4, 7, out[:6])
    assert out[1:6].tolist() == [0, 1, 2, 3, 4]
    store.close()


class LateFile:
    """Moves bytes only when somebody waits for it: what a slow disk does to who does not."""

    def __init__(self, nbytes: int) -> None:
        self.content, self.log = torch.zeros(nbytes, dtype=torch.uint8), []

    def read(self, tensor: torch.Tensor, *, offset: int) -> Any:
        place = slice(offset, offset + tensor.numel())
        return self._begin("read", offset, lambda: tensor.copy_(self.content[place]))

    def write(self, tensor: torch.Tensor, *, offset: int) -> Any:
        place = slice(offset, offset + tensor.numel())
        return self._begin("write", offset, lambda: self.content[place].copy_(tensor))

    def _begin(self, what: str, offset: int, move: Any) -> Any:
        self.log.append((what, offset))

        left = [move]

        class Late:
            def wait(self) -> None:
                while left:
                    left.pop()()

        return Late()


@pytest.mark.skipif(native() is None, reason="built without kernels")
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_a_visit_waits_for_what_it_needs_and_for_nothing_more(tmp_path, count):
    tiles = plan_tiles([(16_384 * count, STATES[1])], tile_bytes=1 << 16)
    store = DiskStore(tiles, str(tmp_path), pin_memory=False)
    store.file = late = LateFile(store.nbytes)
    size, numbers = 1 << 16, list(range(len(tiles)))
    assert len(tiles) == count
    late.content[:] = torch.arange(count, dtype=torch.uint8).repeat_interleave(size)
    seen = []
    for number, region in store.visit(numbers, fresh=set()):
        assert bool((region == number).all()), "read before it is handed out"
        seen.append(list(late.log))
        region += 100
    assert bool(
        (
            late.content
            == torch.arange(100, 100 + count, dtype=torch.uint8).repeat_interleave(size)
        ).all()
    )
    for number in range(count - 1):
        assert ("read", (number + 1) * size) in seen[number], (
            "the next tile is on its way while this one is stepped"
        )
        assert ("write", number * size) in seen[number + 1], "and so is the last one"
