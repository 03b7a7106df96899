"""Beside torch's own distributed checkpoints: DTensors as shards, and our folders read by
torch.distributed.checkpoint.

    state = {"model": as_shards(model.state_dict())}
    save(folder, state)                              FSDP2's DTensors, written by pyops
    load(folder, into=state)                         and filled by pyops
    dcp.load({"model": model.state_dict()}, storage_reader=StorageReader(folder))
                                                     or filled by torch, of any layout

A range of a flattened tensor, as optimizers with states over ranks hold it, has no placement among
torch's, so states are not offered as DTensors; torch asks a reader for boxes, and any box can be
read of any layout. The folders that torch writes keep their index in a pickle, which can run
anything: they are not read. Load one with torch, and save it with `as_shards`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader as TorchReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.futures import Future

from pyops.checkpoint.format.lazy_tensor import LazyTensor
from pyops.checkpoint.loading import Reader
from pyops.flat import Shard, Shards
from pyops.torch_private import local_shape_and_offset

__all__ = ["StorageReader", "as_shards"]


def as_shards(state: Any, *, replicas: bool = False) -> Any:
    """A nested state with `pyops.flat.Shard`s over the same memory in place of DTensors.

    Of what several ranks hold alike (Replicate), the first has a Shard and the others an empty
    `Shards`, so that it is written once; replicas=True gives all of them a Shard, to be filled.

    Raises:
        TypeError: For other placements than Shard and Replicate.
    """
    if isinstance(state, DTensor):
        for placement in state.placements:
            if type(placement) not in (ShardPlacement, Replicate):
                raise TypeError(
                    f"a DTensor is placed {placement}; Shard and Replicate can be saved: "
                    "redistribute it first"
                )
        mesh, shape = state.device_mesh, tuple(state.shape)
        coordinate = mesh.get_coordinate()
        size, offset = local_shape_and_offset(state)
        copies = coordinate is None or any(
            at and isinstance(p, Replicate)
            for at, p in zip(coordinate, state.placements, strict=True)
        )
        if coordinate is None or (copies and not replicas):
            return Shards(())
        inside = tuple(
            min(o, n) for o, n in zip(offset, shape, strict=True)
        )  # torch puts an empty part beyond the end
        return Shard(shape, inside, state.to_local().detach().view(size))
    if isinstance(state, Mapping):
        return {key: as_shards(value, replicas=replicas) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(as_shards(value, replicas=replicas) for value in state)
    return state


class StorageReader(TorchReader):
    """Gives torch.distributed.checkpoint.load the tensors of a checkpoint folder; numbers and texts
    are not offered.

    Names are paths: state["model"]["w"] is "model.w".

    Raises:
        CheckpointError: For a damaged folder.
    """

    def __init__(self, folder: Path | str) -> None:
        self._start(folder)

    def _start(self, folder: Path | str) -> None:
        self.folder = folder
        self._stored: dict[str, LazyTensor] = {}
        reader = Reader(folder)
        reader.check_files()
        self._collect(reader.state())

    def _collect(self, part: Any) -> None:
        if isinstance(part, LazyTensor):
            self._stored[part.name] = part
        for value in (
            part.values()
            if isinstance(part, Mapping)
            else part
            if isinstance(part, list | tuple)
            else ()
        ):
            self._collect(value)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Another folder, if one is given."""
        if checkpoint_id is not None:
            self._start(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Every tensor as one chunk: of which any box can be read."""
        found = {}
        for name, stored in self._stored.items():
            size = torch.Size(stored.shape)
            chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            properties = TensorProperties(dtype=stored.dtype)
            found[name] = TensorStorageMetadata(properties=properties, size=size, chunks=[chunk])
        return Metadata(state_dict_metadata=found)  # type: ignore[arg-type]

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what this rank asked for."""
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise TypeError(
                    f"{item.storage_index.fqn} is no tensor; load numbers and texts with "
                    "pyops.checkpoint.load"
                )
            stored = self._stored[item.storage_index.fqn]
            target = planner.resolve_tensor(item).detach()
            stored.read_into(Shard(stored.shape, tuple(item.storage_offsets), target))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether this is a folder's name."""
        return isinstance(checkpoint_id, str | Path)
