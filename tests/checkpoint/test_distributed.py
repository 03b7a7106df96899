"""FSDP2's DTensors are saved and filled, and torch.distributed.checkpoint reads our folders, on
another number of ranks."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from pyops.checkpoint import CheckpointError, distributed, load, save
from pyops.checkpoint.distributed import StorageReader, as_shards
from pyops.flat import FlatLayout
from tests.checkpoint.test_folder import equal

pytestmark = pytest.mark.cpu_only

WHOLE = {
    "w": torch.arange(35.0).view(5, 7),
    "b": torch.arange(4.0),
    "r": torch.arange(6.0).view(2, 3),
}
PLACED = {"w": Shard(0), "b": Shard(0), "r": Replicate()}


def dtensors(size: int, *, fill: bool = True, columns: bool = False) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,))
    placed = {**PLACED, "w": Shard(1)} if columns else PLACED
    return {
        name: distribute_tensor(
            whole.clone() if fill else torch.full_like(whole, -1.0), mesh, [placed[name]]
        )
        for name, whole in WHOLE.items()
    }


def save_dtensors(rank: int, group: Any, path: str) -> None:
    save(path, {"model": as_shards(dtensors(group.size())), "step": 7}, group=group)


def fill_dtensors(rank: int, group: Any, path: str) -> bool:
    """By us, in rows, and by torch, in columns."""
    rows = dtensors(group.size(), fill=False)
    load(path, into={"model": as_shards(rows, replicas=True)}, group=group)
    columns = dtensors(group.size(), fill=False, columns=True)
    plain = {"w": torch.full((5, 7), -1.0)}
    dcp.load({"model": columns}, storage_reader=StorageReader(path))
    dcp.load({"model": plain}, storage_reader=StorageReader(path))
    return all(
        torch.equal(d[n].full_tensor(), w) for d in (rows, columns) for n, w in WHOLE.items()
    ) and torch.equal(plain["w"], WHOLE["w"])


def test_saved_by_three_filled_by_two(world, tmp_path):
    world(3).run(save_dtensors, str(tmp_path / "c"))
    assert equal(load(tmp_path / "c")[0], {"model": WHOLE, "step": 7})
    assert world(2).run(fill_dtensors, str(tmp_path / "c")) == [True, True]


def save_ranges(rank: int, group: Any, path: str) -> None:
    plan = FlatLayout.plan([(name, whole.shape) for name, whole in WHOLE.items()])
    flat = torch.zeros(plan.numel)
    for name, whole in WHOLE.items():
        flat[plan.slice(name)] = whole.flatten()
    cuts = [0, 17, 70, plan.numel]
    save(
        path,
        {"model": plan.cut(flat[cuts[rank] : cuts[rank + 1]], [(cuts[rank], cuts[rank + 1])])},
        group=group,
    )


def test_ranges_become_dtensors(world, tmp_path):
    """What optimizers with states over ranks hold, filled into FSDP2's layout."""
    world(3).run(save_ranges, str(tmp_path / "c"))
    assert world(2).run(fill_dtensors, str(tmp_path / "c")) == [True, True]


def refuse_partial(rank: int, group: Any) -> str:
    tensor = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()])
    try:
        as_shards({"x": tensor})
    except TypeError as error:
        return str(error)
    return "taken"


def test_a_sum_that_is_still_to_be_made(world):
    told = world(2).run(refuse_partial)
    assert all("Shard and Replicate can be saved: redistribute it first" in text for text in told)


class Attribute:
    """What pickle writes as getattr(kind, name)."""

    def __init__(self, kind: Any, name: str) -> None:
        self._asked = (kind, name)

    def __reduce__(self) -> Any:
        return getattr, self._asked


def test_an_index_names_members_of_its_enumeration_and_no_other_attributes(tmp_path):
    """As Python 3.11.0 to 3.11.3 write a member."""
    kinds = _MEM_FORMAT_ENCODING
    written = pickle.dumps(Attribute(kinds, "TORCH_CONTIGUOUS_FORMAT"))
    found = distributed._IndexUnpickler(io.BytesIO(written)).load()
    assert found is kinds.TORCH_CONTIGUOUS_FORMAT
    for kind, name in ((Path, "rmdir"), (kinds, "__class__")):
        (tmp_path / distributed.INDEX).write_bytes(pickle.dumps(Attribute(kind, name)))
        with pytest.raises(CheckpointError, match=f"{distributed.INDEX} asks for {name} of"):
            distributed.TorchFolder(tmp_path)
