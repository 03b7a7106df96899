"""What ranks hold in parts is loaded as one tensor; parts that don't make one are refused, by their
path, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.checkpoint import CheckpointError, load, save
from pyops.checkpoint.format.shards import describe, find_shards, insert, merge
from pyops.flat import FlatLayout, Shard, Shards
from tests.checkpoint.test_folder import equal, flip

pytestmark = pytest.mark.cpu_only


def layout() -> FlatLayout:
    return FlatLayout.plan(
        [("a", (7,)), ("b", (3, 5)), ("c", (64,)), ("unused", (0,))], alignment=4
    )


def flat(row: int) -> Tensor:
    return torch.arange(layout().numel, dtype=torch.float32) + 1000.0 * row


def of_rank(rank: int, size: int) -> dict[str, Any]:
    """Rows: each rank the whole of its own; ranges: a third of the flat buffer, so names are
    missing on some ranks."""
    plan, cuts = layout(), [layout().numel * r // size for r in range(size + 1)]
    rows = {
        name: Shard(
            (size, *shape),
            (rank, *(0 for _ in shape)),
            flat(rank)[plan.slice(name)].view(1, *shape),
        )
        for name, shape in zip(plan.names, plan.shapes, strict=True)
    }
    ranges = {
        name: Shard(
            (plan.slice(name).stop - plan.slice(name).start,), (part.start,), flat(9)[place]
        )
        for name, part, place in plan.shards(cuts[rank], cuts[rank + 1])
    }
    return {
        "step": 7,
        "w": torch.ones(2) * rank,
        "errors": {"rows": rows, "ranges": ranges, "codec": "onebit"},
    }


def whole(size: int) -> dict[str, Any]:
    plan = layout()
    rows = {
        n: torch.stack([flat(r)[plan.slice(n)].view(s) for r in range(size)])
        for n, s in zip(plan.names, plan.shapes, strict=True)
    }
    ranges = {n: flat(9)[plan.slice(n)] for n in ("a", "b", "c")}
    return {
        "step": 7,
        "w": torch.zeros(2),
        "errors": {"rows": rows, "ranges": ranges, "codec": "onebit"},
    }


def save_and_load(rank: int, group: Any, path: str) -> tuple[Any, Any]:
    save(path, of_rank(rank, group.size()), own={"rank": rank}, group=group)
    return load(path, group=group)


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_loads_the_whole_tensor(world, tmp_path, size: int):
    for rank, (state, own) in enumerate(world(size).run(save_and_load, str(tmp_path / "c"))):
        assert equal(state, whole(size))
        assert own == {"rank": rank}
    assert equal(load(tmp_path / "c")[0], whole(size)), "one process reads what several wrote"


def test_one_rank_alone_and_a_state_without_shards(tmp_path):
    save(tmp_path / "c", of_rank(0, 1))
    assert equal(load(tmp_path / "c")[0], whole(1))
    save(tmp_path / "d", {"step": 7}, own=1)
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == [
        "manifest.json",
        "own-00000.safetensors",
        "shared.safetensors",
    ]


def in_buckets(rank: int, size: int, *, bucket: int, value: float = 0.0) -> dict[str, Any]:
    """Each rank a chunk of each bucket of a flat buffer, as optimizers with states over ranks have
    it."""
    plan = layout()
    chunk = bucket // size
    starts = range(rank * chunk, plan.numel, bucket)
    ranges = [(start, min(start + chunk, plan.numel)) for start in starts]
    local = torch.cat([torch.empty(0), *(flat(0)[a:b] + value for a, b in ranges)])
    return {"step": rank, "moments": plan.cut(local, ranges)}


def save_buckets(rank: int, group: Any, path: str, bucket: int) -> Any:
    save(path, in_buckets(rank, group.size(), bucket=bucket), group=group)
    return load(path, group=group)[0]


@pytest.mark.parametrize("bucket", [6, 12, 48, 1000])
def test_ranges_of_every_bucket_become_tensors_of_their_shape(world, tmp_path, bucket: int):
    plan = layout()
    wanted = {
        n: flat(0)[plan.slice(n)].view(s) for n, s in zip(plan.names, plan.shapes, strict=True)
    }
    for state in world(3).run(save_buckets, str(tmp_path / "c"), bucket):
        assert equal(state, {"step": 0, "moments": wanted})
    assert equal(load(tmp_path / "c")[0]["moments"], wanted), "one process reads what several wrote"


def shard(shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> Shard:
    return Shard(shape, offset, torch.rand(size))


def merged(*states: Any) -> Any:
    return insert(
        states[0], merge([describe(find_shards(s), file=f"{r}")[0] for r, s in enumerate(states)])
    )


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (
            [{"e": shard((4, 3), (0, 0), (2, 3))}, {"e": shard((4, 3), (3, 0), (1, 3))}],
            r"state\['e'\] has a gap.* 9 of the 12",
        ),
        (
            [{"e": shard((4, 3), (0, 0), (3, 3))}, {"e": shard((4, 3), (2, 1), (2, 1))}],
            r"'e'.*rank 1 at .*\[2, 1\] overlaps",
        ),
        (
            [{"e": shard((4,), (0,), (4,))}, {"e": shard((4,), (0,), (4,))}],
            r"state\['e'\].*overlaps that of rank 0",
        ),
        # volumes add up, yet some elements are there twice and others not at all
        (
            [{"e": shard((4,), (0,), (2,))}, {"e": shard((4,), (1,), (2,))}],
            r"state\['e'\].*overlaps",
        ),
        (
            [{"e": shard((2, 2), (0, 0), (2, 1))}, {"e": shard((2, 2), (0, 0), (1, 2))}],
            r"state\['e'\].*overlaps",
        ),
        (
            [
                {"e": shard((6,), (0,), (2,))},
                {"e": shard((6,), (4,), (2,))},
                {"e": shard((6,), (1,), (2,))},
            ],
            r"state\['e'\].*rank 2 at offset \[1\] overlaps that of rank 0",
        ),
        ([{"e": shard((4,), (0,), (0,))}], r"state\['e'\] has a gap.*0 of the 4"),
        (
            [{"e": {"x": shard((4,), (0,), (2,))}}, {"e": {"x": shard((5,), (2,), (3,))}}],
            r"'e.x'.*global_shape \[4\].*\[5\]",
        ),
        (
            [{"e": shard((4,), (0,), (2,))}, {"e": Shard((4,), (2,), torch.ones(2).int())}],
            r"'e'.*dtype float32.*int32",
        ),
        (
            [{"e": shard((4, 3), (0,), (5,))}, {"e": shard((4, 3), (6,), (6,))}],
            r"'e'.* has a gap.* 11 of the 12.*\[4, 3\]",
        ),
        (
            [{"e": shard((4, 3), (0,), (7,))}, {"e": shard((4, 3), (6,), (6,))}],
            r"'e'.* rank 1 at offset \[6\] overlaps",
        ),
        (
            [{"e": shard((4, 3), (0,), (6,))}, {"e": shard((4, 3), (2, 0), (2, 3))}],
            r"'e'.* in ranges .* in boxes of 2 dims",
        ),
        (
            [{"e": Shards((shard((4,), (0,), (2,)), shard((4,), (1,), (2,))))}],
            r"'e'.* at offset \[1\] overlaps.* rank 0",
        ),
        ([{"e": Shards(())}, {"e": shard((4,), (0,), (3,))}], r"'e'.* has a gap"),
        (
            [{"e": torch.ones(4)}, {"e": shard((4,), (0,), (4,))}],
            r"'e'.* on another rank, on rank 0 a Tensor",
        ),
        (
            [{"e": [1]}, {"e": [1, shard((4,), (0,), (4,))]}],
            r"state\['e.1'\].*state\['e'\] is a list without it",
        ),
        (
            [{"e": 3}, {"e": {"x": shard((4,), (0,), (4,))}}],
            r"state\['e.x'\].*state\['e'\] is a int without it",
        ),
    ],
)
def test_shards_that_make_no_whole(states: list[Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        merged(*states)


@pytest.mark.parametrize("reverse", [False, True])
def test_shards_that_do(reverse: bool):
    quarters = [shard((4, 4), (r, c), (2, 2)) for r in (0, 2) for c in (0, 2)]
    states = [{"e": [s, None], "f": None} for s in (quarters[::-1] if reverse else quarters)]
    state = merged(*states, {"f": {"deep": {7: shard((), (), ())}}})
    assert len(state["e"][0].node["parts"]) == 4
    assert state["f"]["deep"][7].node["shape"] == []
    several = Shards((shard((2, 3), (4,), (2,)), shard((2, 3), (0,), (1,))))
    state = merged({"e": Shards(())}, {"e": several}, {"e": shard((2, 3), (1,), (3,))})
    assert [p["name"] for p in state["e"].node["parts"]] == ["e@4", "e@0", "e"]
    assert state["e"].node["shape"] == [2, 3]
    assert merged({"e": (1, 2), "f": shard((0, 3), (0, 0), (0, 3))})["e"] == (1, 2)


def refuse(rank: int, group: Any, path: str) -> list[str]:
    told = []
    good = {"e": Shard((4,), (2 * rank,), torch.full((2,), float(rank)))}
    save(path, good, group=group)
    for state, own in [
        ({"e": Shard((4,), (0,), torch.ones(2))}, None),
        ({"e": good["e"] if rank else 3}, None),
        (good, {"mine": good["e"]} if rank else None),
    ]:
        try:
            save(path, state, own=own, group=group)
        except (CheckpointError, TypeError) as error:
            told.append(str(error))
    assert load(path, group=group)[0]["e"].tolist() == [0, 0, 1, 1], (
        "what was there before is whole"
    )
    group.barrier().wait()
    if rank == 1:
        flip(Path(path) / "shards-00001.safetensors")
    group.barrier().wait()
    try:
        load(path, group=group)
    except CheckpointError as error:
        told.append(str(error))
    return told


def test_all_ranks_are_told_alike_and_the_old_one_stays(world, tmp_path):
    first, second = world(2).run(refuse, str(tmp_path / "c"))
    assert first == second
    assert "state['e']: the shard of rank 1 at offset [0] overlaps that of rank 0" in first[0]
    assert "has a gap" in first[1]
    assert "own['mine'] is a Shard; shards belong in state" in first[2]
    assert "shards-00001.safetensors is damaged" in first[3]
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
