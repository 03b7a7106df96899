"""Arena: tensors keep their contents, their addresses and their views, whatever comes, goes, or is
defragmented around them."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from pyops.ops.library import native
from pyops.recompute.arena import Arena

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(native() is None, reason="built without kernels"),
]

PAGE = 4096


def pages(arena: Arena, count: int, value: int = 0) -> torch.Tensor:
    return arena.empty((count * PAGE,), dtype=torch.uint8).fill_(value)


def test_a_mark_that_moves_up_and_down():
    arena = Arena(10 * PAGE)
    a, b, c = (pages(arena, n, n) for n in (2, 3, 1))
    assert [b.data_ptr() - a.data_ptr(), c.data_ptr() - a.data_ptr()] == [2 * PAGE, 5 * PAGE], (
        "one after the other"
    )
    assert (arena.used, arena.room, arena.nbytes) == (6 * PAGE, 4 * PAGE, 10 * PAGE)
    place = c.data_ptr()
    del c
    assert arena.room == 5 * PAGE
    d = pages(arena, 5)
    assert d.data_ptr() == place, "last in, first out: the place is used again"
    del d, b
    assert (arena.used, arena.room, arena.peak) == (2 * PAGE, 8 * PAGE, 10 * PAGE)
    assert bool((a == 2).all())


def test_memory_stays_as_long_as_any_view_of_it():
    arena = Arena(4 * PAGE)
    x = arena.empty((100, 5), dtype=torch.float64).fill_(1.5)
    view = x[3:, 1:3].t()
    del x
    gc.collect()
    assert arena.used == PAGE
    other = pages(arena, 3, 255)
    assert bool((view == 1.5).all())
    del view
    assert arena.used == 3 * PAGE
    assert bool((other == 255).all())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str
)
def test_tensors_are_ordinary(dtype):
    arena = Arena(PAGE)
    x = arena.empty((3, 4), dtype=dtype)
    assert (x.shape, x.dtype, x.is_contiguous(), x.data_ptr() % PAGE) == ((3, 4), dtype, True, 0)
    x.copy_(torch.ones(3, 4))
    assert torch.equal(x, torch.ones(3, 4).to(dtype))
    assert arena.empty((0, 4), dtype=dtype).numel() == 0


def test_defragmentation_keeps_contents_addresses_and_views():
    arena = Arena(16 * PAGE)
    tensors = [pages(arena, 1, i) for i in range(16)]
    views = [t[5:99] for t in tensors]
    addresses = [t.data_ptr() for t in tensors]
    for i in range(0, 16, 2):
        tensors[i] = views[i] = None
    assert (arena.used, arena.room) == (8 * PAGE, 0), "eight holes of one page"
    assert arena.defragment() == 8 * PAGE
    big = pages(arena, 8, 200)
    for i in range(1, 16, 2):
        assert tensors[i].data_ptr() == addresses[i]
        assert bool((tensors[i] == i).all())
        assert bool((views[i] == i).all())
        tensors[i].fill_(100 + i)
        assert bool((views[i] == 100 + i).all()), "a view is of the same memory"
    assert bool((big == 200).all()), "no page is in use twice"
    with pytest.raises(RuntimeError, match="has 0 free"):
        pages(arena, 1)
    del big
    tensors, views = [], []
    assert (arena.used, arena.room) == (0, 16 * PAGE)


def test_an_allocation_closes_holes_by_itself_and_says_when_it_can_not():
    arena = Arena(8 * PAGE)
    a, b, c = pages(arena, 3, 1), pages(arena, 2, 2), pages(arena, 3, 3)
    del a
    with pytest.raises(
        RuntimeError,
        match=r"arena of 32768 bytes has 12288 free, and a tensor of shape \(4, 4096\)",
    ):
        arena.empty((4, PAGE), dtype=torch.uint8)
    d = pages(arena, 2, 4)
    del c
    e = pages(arena, 4, 5)
    assert [int(t[-1]) for t in (b, d, e)] == [2, 4, 5]
    assert arena.used == 8 * PAGE


def test_a_long_life_at_random_never_mixes_two_tensors():
    arena, draw = Arena(64 * PAGE), random.Random(0)
    alive: dict[int, torch.Tensor] = {}
    refused = closed = 0
    for turn in range(3000):
        if alive and draw.random() < 0.5:
            key = draw.choice(list(alive))
            assert bool((alive[key] == key % 251).all())
            del alive[key]
        elif draw.random() < 0.05:
            arena.defragment()
        else:
            count = draw.randint(1, 20)
            free = 64 - arena.used // PAGE
            if count > free:
                refused += 1
                with pytest.raises(RuntimeError, match="make the arena larger"):
                    pages(arena, count)
            else:
                closed += arena.room < count * PAGE
                alive[turn] = pages(arena, count, turn % 251)
    assert all(bool((t == key % 251).all()) for key, t in alive.items())
    assert arena.used == sum(t.numel() for t in alive.values())
    assert refused > 50
    assert closed > 50, "holes had to be closed"
    alive.clear()
    assert (arena.used, arena.room) == (0, arena.nbytes)


def test_tensors_outlive_the_arena_object():
    x = Arena(PAGE).empty((7,)).fill_(3.0)
    gc.collect()
    assert bool((x == 3.0).all())


def test_mappings_go_with_the_arena():
    def mapped() -> int:
        with open("/proc/self/maps") as file:
            return sum("pyops-arena" in line for line in file)

    before = mapped()
    arena = Arena(16 * PAGE)
    tensors = [pages(arena, 1) for _ in range(16)]
    del tensors[::2]
    arena.defragment()
    assert mapped() > before + 1
    del tensors, arena
    assert mapped() == before


def test_pinned_memory_is_given_back_to_cuda_before_it_goes(monkeypatch):
    class Runtime:
        def __init__(self):
            self.pinned, self.log = {}, []

        def cudaHostRegister(self, address, nbytes, flags):
            self.pinned[address] = nbytes
            return 0

        def cudaHostUnregister(self, address):
            with open("/proc/self/maps") as file:
                assert any(line.startswith(f"{address:x}-") for line in file), (
                    "it must still be there"
                )
            self.log.append(self.pinned.pop(address))

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.log.append("waited"))
    arena = Arena(3 * PAGE, pin_memory=True)
    assert list(runtime.pinned.values()) == [3 * PAGE]
    del arena
    gc.collect()
    assert runtime.log == ["waited", 3 * PAGE]


def test_what_it_refuses():
    with pytest.raises(ValueError, match="an arena needs 1 byte or more, got 0"):
        Arena(0)
    with pytest.raises(
        RuntimeError,
        match=r"an arena of 1152921504606846976 bytes: the system has \d+ available; ask for less",
    ):
        Arena(1 << 60)
