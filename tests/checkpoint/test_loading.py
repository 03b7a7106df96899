"""A checkpoint is read into any layout, from the bytes that it needs; tensors that nobody asked for
stay on the disk."""

from __future__ import annotations

import json
import os
import zlib
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyops.checkpoint import CheckpointError, LazyTensor, load, save
from pyops.checkpoint.format import tensor_file
from pyops.checkpoint.format.manifest import seal
from pyops.flat import FlatLayout, Shard, Shards, boxes_of_range
from tests.checkpoint.test_folder import equal, flip

pytestmark = pytest.mark.cpu_only


def test_boxes_by_hand():
    assert boxes_of_range((4, 5), 3, 14) == [((0, 3), (1, 2)), ((1, 0), (1, 5)), ((2, 0), (1, 4))]
    assert boxes_of_range((4, 5), 11, 13) == [((2, 1), (1, 2))]
    assert boxes_of_range((4, 5), 5, 15) == [((1, 0), (2, 5))]
    assert boxes_of_range((), 0, 1) == [((), ())]
    assert boxes_of_range((7,), 2, 5) == [((2,), (3,))]
    assert boxes_of_range((4, 5), 6, 6) == []


@given(st.data())
def test_boxes_of_a_range_are_its_elements_in_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    numbers, found = torch.arange(prod(shape)).view(shape), []
    for offset, size in boxes_of_range(shape, start, stop):
        found += (
            numbers[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
            .flatten()
            .tolist()
        )
    assert found == list(range(start, stop))


WHOLE = torch.arange(4 * 6 * 5, dtype=torch.float32).view(4, 6, 5)


def box(*where: slice) -> Shard:
    part = WHOLE[where]
    return Shard((4, 6, 5), tuple(s.start or 0 for s in where) + (0,) * (3 - len(where)), part)


def ranges(*cuts: int) -> Shards:
    pairs = zip(cuts[::2], cuts[1::2], strict=True)
    return Shards(tuple(Shard((4, 6, 5), (a,), WHOLE.flatten()[a:b]) for a, b in pairs))


STORED = {
    "whole": [{"w": WHOLE}],
    "rows": [{"w": box(slice(0, 1))}, {"w": box(slice(1, 4))}],
    "columns": [
        {"w": box(slice(None), slice(None), slice(0, 2))},
        {"w": box(slice(None), slice(None), slice(2, 5))},
    ],
    "ranges": [{"w": ranges(0, 7, 33, 100)}, {"w": ranges(7, 33, 100, 120)}, {"w": Shards(())}],
}


def save_as(rank: int, group: Any, path: str, name: str) -> None:
    states = STORED[name]
    save(path, states[rank] if rank < len(states) else {}, group=group)


@pytest.fixture(scope="module")
def stored(world, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    for name in STORED:
        world(3).run(save_as, str(folder / name), name)
    return folder


def empty_like(target: Any, **changes: Any) -> Any:
    if isinstance(target, Shards):
        return Shards(tuple(empty_like(part, **changes) for part in target))
    if isinstance(target, Shard):
        return Shard(
            target.global_shape, target.offset, torch.full_like(target.tensor, -1.0, **changes)
        )
    return torch.full_like(target, -1.0, **changes)


def tensors_of(target: Any) -> list[Tensor]:
    if isinstance(target, Shards):
        return [part.tensor for part in target]
    return [target.tensor if isinstance(target, Shard) else target]


TARGETS = {
    "whole": WHOLE,
    "strided": WHOLE.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "rows": box(slice(1, 3)),
    "columns": box(slice(None), slice(2, 5), slice(1, 2)),
    "one": box(slice(2, 3), slice(5, 6), slice(4, 5)),
    "range": ranges(3, 77),
    "ranges": ranges(0, 1, 31, 32, 40, 120),
    "nothing": Shards(()),
}


@pytest.mark.parametrize("piece", [1 << 22, 16, 64])
@pytest.mark.parametrize("name", STORED)
def test_any_layout_into_any_layout(stored, monkeypatch, name, piece):
    monkeypatch.setattr("pyops.checkpoint.format.lazy_tensor.PIECE", piece)
    for wanted, target in TARGETS.items():
        for dtype in torch.float32, torch.float64:
            into = empty_like(target, dtype=dtype)
            state, _ = load(stored / name, into={"w": into})
            assert state["w"] is into
            for ours, theirs in zip(tensors_of(into), tensors_of(target), strict=True):
                assert torch.equal(ours, theirs.to(dtype)), (wanted, dtype)
    state, _ = load(stored / name, lazy=True)
    assert isinstance(state["w"], LazyTensor)
    assert (state["w"].shape, state["w"].dtype, state["w"].numel) == ((4, 6, 5), torch.float32, 120)
    assert torch.equal(state["w"].read(), WHOLE)


def test_what_is_not_asked_for_is_stored(tmp_path):
    given_state = {
        "model": {"a": torch.randn(3), "b": torch.randn(2, 2)},
        "step": 7,
        "list": [torch.ones(1), (2, torch.zeros(2))],
    }
    save(tmp_path / "c", given_state, own={"rng": torch.arange(5)})
    a, deep = torch.empty(3, dtype=torch.bfloat16), torch.empty(2)
    parameter = torch.nn.Parameter(torch.empty(2, 2))
    into = {"model": {"a": a, "b": parameter}, "other": {"x": None}, "list": [None, (None, deep)]}
    state, own = load(tmp_path / "c", into=into)
    assert torch.equal(a, given_state["model"]["a"].bfloat16())
    assert torch.equal(parameter.detach(), given_state["model"]["b"])
    assert not deep.any()
    assert set(state) == {"model", "step", "list"}
    assert state["step"] == 7
    assert state["list"][1] == (2, deep)
    assert isinstance(state["list"][0], LazyTensor)
    assert equal(own, {"rng": torch.arange(5)})


@pytest.mark.parametrize(
    ("into", "message"),
    [
        (
            {"model": {"c": torch.empty(3)}},
            r"into\['model.c'\] is a tensor, and the checkpoint has no such entry",
        ),
        (
            {"step": torch.empty(3)},
            r"into\['step'\] is a tensor, and the checkpoint has a int there",
        ),
        ({"model": [torch.empty(3)]}, r"into\['model.0'\] is a tensor"),
        (
            {"model": {"a": torch.empty(3), "b": torch.empty(4)}},
            r"model.b has shape \[2, 2\] in the checkpoint, \[4\] here",
        ),
        (
            {"model": {"b": Shard((4,), (0,), torch.empty(2))}},
            r"model.b has shape \[2, 2\] in the checkpoint, \[4\] here",
        ),
        (
            {"model": {"b": torch.empty(2, 2, dtype=torch.int64)}},
            r"model.b is torch.float32 in the checkpoint, torch.int64 here",
        ),
        ({"model": {"b": torch.empty(2, 2, device="meta")}}, r"model.b is on the meta device here"),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path, into, message):
    save(
        tmp_path / "c",
        {"first": torch.ones(3), "model": {"a": torch.ones(3), "b": torch.ones(2, 2)}, "step": 7},
    )
    first = torch.full((3,), -1.0)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "c", into={"first": first, **into})
    assert first.eq(-1).all()


def large(rank: int, size: int) -> dict[str, Any]:
    """8 MiB in ranges, a chunk of each of four buckets on each rank."""
    plan = FlatLayout.plan([("a", (1024, 1024)), ("b", (1000, 1000)), ("c", (7,))])
    quarter, chunk = plan.numel // 4, plan.numel // 4 // size
    pairs = []
    for bucket in range(4):
        start = bucket * quarter + rank * chunk
        pairs.append((start, start + chunk if rank + 1 < size or bucket < 3 else plan.numel))
        if rank + 1 == size and bucket < 3:
            pairs[-1] = (start, (bucket + 1) * quarter)
    local = torch.cat([torch.arange(a, b, dtype=torch.float32) for a, b in pairs])
    return {
        "model": dict(plan.cut(local, pairs)),
        "big": torch.zeros(1 << 20) if rank == 0 else None,
    }


def save_large(rank: int, group: Any, path: str) -> None:
    save(path, large(rank, group.size()), group=group)


def load_large(rank: int, group: Any, path: str) -> tuple[bool, int, int]:
    """Whether every element is right; bytes read, bytes held."""
    wanted = large(rank, group.size())["model"]
    into = {name: empty_like(parts) for name, parts in wanted.items()}
    counted, inner, largest = [0], os.preadv, [0]

    def counting(fd: int, buffers: Any, at: int) -> int:
        n = inner(fd, buffers, at)
        counted[0] += n
        return n

    tensor_file.os.preadv = counting
    make = torch.empty

    def measured(*arguments: Any, **options: Any) -> Tensor:
        found = make(*arguments, **options)
        largest[0] = max(largest[0], found.numel() * found.element_size())
        return found

    torch.empty = measured
    try:
        load(path, into={"model": into}, group=group)
    finally:
        tensor_file.os.preadv, torch.empty = inner, make
    held = sum(t.numel() * 4 for parts in wanted.values() for t in tensors_of(parts))
    right = all(
        torch.equal(a, b)
        for name in wanted
        for a, b in zip(tensors_of(into[name]), tensors_of(wanted[name]), strict=True)
    )
    return right, counted[0], largest[0] if largest[0] > held // 2 else 0


def test_a_rank_reads_what_it_needs(world, tmp_path):
    """Saved by 3 ranks, loaded by 2: each its own ranges; twice (compared, then read), and the
    blocks' edges."""
    world(3).run(save_large, str(tmp_path / "c"))
    for right, read, largest in world(2).run(load_large, str(tmp_path / "c")):
        assert right
        held = 4 * (1024 * 1024 + 1000 * 1000) // 2
        assert 2 * held <= read < 2 * held + 14 * (1 << 20), "of 12 MiB in all files"
        assert largest == 0, "no buffer of the size of a tensor"


def older(folder: Path, version: int) -> None:
    """As version 1 and 2 wrote it: one checksum for each file."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["crc32"]
    for name, entry in manifest["files"].items():
        entry["crc32"] = zlib.crc32((folder / name).read_bytes())
        del entry["block"]
    (folder / "manifest.json").write_text(json.dumps(seal({**manifest, "version": version})))


def test_older_versions_are_read(tmp_path):
    state = {"w": torch.randn(1000, 700), "e": Shard((2,), (0,), torch.ones(2))}
    save(tmp_path / "c", state)
    older(tmp_path / "c", 2)
    assert equal(load(tmp_path / "c")[0], {"w": state["w"], "e": torch.ones(2)})
    rows = Shard((1000, 700), (10, 0), torch.empty(5, 700))
    load(tmp_path / "c", into={"w": rows})
    assert torch.equal(rows.tensor, state["w"][10:15])
    flip(tmp_path / "c" / "shared.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"shared.safetensors is damaged: the checksum of bytes 0 to 28\d+ is not",
    ):
        load(tmp_path / "c", into={"w": rows})


def damaged_part(rank: int, group: Any, path: str) -> list[Any]:
    """Only rank 1 needs what is damaged; both are told, and neither's memory is touched."""
    into = {"w": Shard((4, 6, 5), (rank * 2, 0, 0), torch.full((2, 6, 5), -1.0))}
    try:
        load(path, into=into, group=group)
    except CheckpointError as error:
        return [str(error), into["w"].tensor.eq(-1).all().item()]
    return ["loaded", False]


def compare_lazily(rank: int, group: Any, path: str) -> str:
    """The damaged block is in the second rank's share."""
    try:
        load(path, lazy=True, compare=True, group=group)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_damage_that_one_rank_meets_changes_nothing_on_any(world, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "BLOCK", 64)
    save(tmp_path / "c", {"w": WHOLE})
    flip(tmp_path / "c" / "shared.safetensors")
    first, second = world(2).run(damaged_part, str(tmp_path / "c"))
    assert first == second
    assert "shared.safetensors is damaged: the checksum of bytes" in first[0]
    assert first[1] is True
    with pytest.raises(CheckpointError, match=r"shared.safetensors is damaged"):
        load(tmp_path / "c", lazy=True, compare=True)
    first, second = world(2).run(compare_lazily, str(tmp_path / "c"))
    assert first == second
    assert "shared.safetensors is damaged" in first
    state, _ = load(tmp_path / "c", lazy=True)
    rows = Shard((4, 6, 5), (0, 0, 0), torch.empty(2, 6, 5))
    state["w"].read_into(rows)
    assert torch.equal(rows.tensor, WHOLE[:2]), "the undamaged half can be read"
    with pytest.raises(CheckpointError, match="is damaged"):
        state["w"].read()


def test_targets_without_memory_or_with_elements_that_share_it_are_named(tmp_path: Path):
    value = torch.arange(12.0).view(4, 3)
    save(tmp_path / "c", {"w": value})
    emptied, kept = torch.zeros(4, 3), torch.zeros(12)
    emptied.untyped_storage().resize_(0)
    short = torch.zeros(4, 3)
    short.untyped_storage().resize_(40)
    shared = kept.as_strided((4, 3), (2, 1))
    for target, words in (
        (emptied, "no memory"),
        (short, "no memory"),
        (shared, "share memory"),
        (torch.zeros(3).expand(4, 3), "share memory"),
        (torch.zeros(4, 3).to_sparse(), "dense"),
    ):
        with pytest.raises(CheckpointError, match=rf"w .*{words}"):
            load(tmp_path / "c", into={"w": target})
    assert not kept.any()
    for target in (torch.zeros(3, 4).t(), torch.zeros(8, 6)[::2, ::2], torch.zeros(1, 4, 3)[0]):
        load(tmp_path / "c", into={"w": target})
        assert torch.equal(target, value)
