"""Beside torch's own distributed checkpoints: DTensors as shards, and our folders read by
torch.distributed.checkpoint.

    state = {"model": as_shards(model.state_dict())}
    save(folder, state)                              FSDP2's DTensors, written by pyops
    load(folder, into=state)                         and filled by pyops
    dcp.load({"model": model.state_dict()}, storage_reader=StorageReader(folder))
                                                     or filled by torch, of any layout

A range of a flattened tensor, as optimizers with states over ranks hold it, has no placement among
torch's, so states are not offered as DTensors; torch asks a reader for boxes, and any box can be
read of any layout.

    TorchFolder(folder).read("model.w")              a tensor of what torch's dcp.save wrote

The folders that torch writes keep their index in a pickle, which can run anything; TorchFolder lets
it make what such an index is made of, and nothing else.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
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
from pyops.checkpoint.format.manifest import CheckpointError
from pyops.checkpoint.loading import Reader
from pyops.flat import Shard, Shards
from pyops.torch_private import local_shape_and_offset

__all__ = ["TORCH_ERRORS", "StorageReader", "TorchFolder", "as_shards", "last_line"]

INDEX = ".metadata"  # as torch calls it
# torch has many errors, and its own is no Exception.
TORCH_ERRORS = (Exception, dcp.api.CheckpointException)
# What the index of a folder of torch's is made of: {module: names}.
OF_INDEX = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
}


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


class TorchFolder:
    """The tensors of a folder that torch.distributed.checkpoint.save wrote, of any layout, read
    whole and one at a time.

    Args:
        folder: With torch's `.metadata` and `.distcp` files.

    Attributes:
        tensors: {name: (shape, dtype)}; names are paths, "model.w" for state["model"]["w"].

    Raises:
        CheckpointError: It is no such folder, or its index names what no index is made of.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._reader = _KnownIndexReader(self.folder)
        self.tensors = {
            name: (tuple(each.size), each.properties.dtype)
            for name, each in self._reader.read_metadata().state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """A whole tensor, in new CPU memory. Local: no rank waits for another.

        Args:
            name: Of `tensors`.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        shape, dtype = self.tensors[name]
        found = torch.empty(shape, dtype=dtype, device="cpu")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that one process reads
                dcp.load({name: found}, storage_reader=self._reader, no_dist=True)
        except TORCH_ERRORS as error:
            raise CheckpointError(
                f"{name} of {self.folder} can't be read ({last_line(error)}); save it again"
            ) from None
        return found


def last_line(error: BaseException) -> str:
    """The class of an error and what it says at last: torch's has the traceback of each rank
    before."""
    said = f"{error}".strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[-1]}"


class _KnownIndexReader(FileSystemReader):
    """torch's reader, with an index that can make nothing but what an index is made of."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            with open(folder / INDEX, "rb") as file:
                found = _IndexUnpickler(file).load()
        except OSError:
            raise CheckpointError(
                f"{folder} has no {INDEX}, so it is none of torch.distributed.checkpoint; name a "
                "folder that its save() wrote, or read one of pyops with pyops.checkpoint.load"
            ) from None
        except CheckpointError as error:
            raise CheckpointError(f"{folder / INDEX} {error}") from None
        except Exception as error:
            raise CheckpointError(f"{folder / INDEX} is damaged ({error}); save it again") from None
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{folder / INDEX} is no index of torch; save it again")
        self._index = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


def _member(kind: Any, name: str) -> Any:
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 write as getattr(kind, name)."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise CheckpointError(f"asks for {name} of {kind!r}, which no index of torch does")
    return kind[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        known = name in OF_INDEX.get(module, ())
        found = super().find_class(module, name) if known or module == "torch" else None
        if known or isinstance(found, torch.dtype):
            return found
        raise CheckpointError(
            f"names {module}.{name}, which no index of torch is made of: it may run anything; if "
            "you trust it, load it with torch and save it with pyops.checkpoint.save"
        )
