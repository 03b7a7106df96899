"""Training state on disk: tensors in safetensors files, the rest in a JSON manifest, nothing
pickled.

save(folder, state, own=..., group=...)  written beside `folder`, then renamed: whole or not there
load(folder, group=...) -> (state, own)  checked against the manifest first: a damaged file is named
Checkpoints(folder, keep=2)              folder/step-00000100, ...: the newest `keep` stay

state   nested dicts, lists and tuples of tensors, numbers, strings, booleans and None; the same on
        all ranks, except that `pyops.flat.Shard`s of one tensor at one path, each rank's part, are
        loaded as the whole tensor
own     the same kind of thing, of this rank alone: the state of its random number generator
"""

from pyops.checkpoint.background import BackgroundSaver
from pyops.checkpoint.folder import Checkpoints, save
from pyops.checkpoint.format.lazy_tensor import LazyTensor
from pyops.checkpoint.format.manifest import CheckpointError
from pyops.checkpoint.loading import Reader, load
from pyops.checkpoint.memory.checkpoints import MemoryCheckpoints
from pyops.renamed import missing_attribute

__all__ = [
    "BackgroundSaver",
    "CheckpointError",
    "Checkpoints",
    "LazyTensor",
    "MemoryCheckpoints",
    "Reader",
    "load",
    "save",
]


def __getattr__(name: str) -> object:
    raise missing_attribute(__name__, name)
