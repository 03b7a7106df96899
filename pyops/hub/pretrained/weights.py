"""PretrainedWeights: the tensors of a Hugging Face folder, read one after the other into the
modules of a model of which each rank has a part.

    q_proj.weight [64, 64]  --read-->  finite?  --rank 1's rows-->  [32, 64], in its memory
                                                then the next; memory of one tensor at a time
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyops.hub.folder_files import FLOATING, HubError, open_weights
from pyops.hub.pretrained.layouts import copy_part, whole_shape
from pyops.hub.pretrained.sources import Sources, find_sources, ignorable, may_lack

__all__ = ["PretrainedWeights", "WeightReport", "folder_that_is_whole"]

NAMED = 6  # names of tensors that a message lists
BLOCK_BYTES = 16 << 20  # of a second copy of a tensor that is compared with the first
Own = tuple[str, str, Tensor]  # (name in the model, name in the module, tensor)


def folder_that_is_whole(folder: Path | str) -> Path:
    """The folder, or what a save that was killed between its two renames has left of the one
    before.

    Args:
        folder: May not exist.
    """
    found = Path(folder)
    old = found.with_name(found.name + ".old")
    return old if not found.exists() and old.exists() else found


@dataclass(frozen=True)
class WeightReport:
    """What `PretrainedWeights.check` found beside the tensors that are in both."""

    new: tuple[str, ...] = ()
    """Names of the model's tensors that the files lack: `fill` gives them first values."""

    unused: tuple[str, ...] = ()
    """Names of the files' tensors that the model does not have."""


class PretrainedWeights:
    """The tensors of a Hugging Face folder: `check` them against a model, then `fill` its modules.

    It is a context manager; `close` ends it otherwise.

    Args:
        folder: With model.safetensors, or several files with their index.

    Raises:
        HubError: For files that are missing, damaged or cut short.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = folder_that_is_whole(folder)
        self._stack = ExitStack()
        self._weights = self._stack.enter_context(open_weights(self.folder))
        self._model: nn.Module | None = None
        self._sources = Sources()
        self._names: dict[nn.Module, str] = {}
        self._instead: dict[str, str] = {}  # the name under which the files have a tied tensor
        self._copies: dict[str, list[str]] = {}  # other names under which they have it, too
        self._new: dict[str, tuple[nn.Module, str]] = {}

    def __enter__(self) -> PretrainedWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    @property
    def bytes_read(self) -> int:
        """Of all tensors so far."""
        return self._weights.bytes_read

    def check(
        self, model: nn.Module, *, allow_missing: bool = False, allow_unused: bool = False
    ) -> WeightReport:
        """Compare names, shapes and kinds of numbers with those of a model; reads no tensor.

        The names that the files have in front of a base model's, or lack, are put right, and so are
        the names and layouts of other versions that transformers reads. Call it before the model is
        cut into pipeline stages: what other stages hold would be missed.

        Args:
            model: With parameters on the meta device or not; it may be cut by
                `pyops.tensor_parallel.parallelize`.
            allow_missing: Whether the files may lack tensors, those of a new head say, to which
                `fill` then gives first values.
            allow_unused: Whether the files may hold tensors that the model does not have.

        Returns:
            The names of both.

        Raises:
            HubError: Tensors are missing, are not the model's, or have other shapes or dtypes.
        """
        sources = find_sources(model, self._weights.shapes)
        groups = _tied_groups(model)
        missing = [names[0] for names in groups if not any(n in sources.shapes for n in names)]
        lacked = may_lack(model)
        refused = [name for name in missing if not lacked.search(name)]
        unused = _unused(model, sources)
        if len(missing) == len(groups) and groups:
            raise HubError(
                f"{self.folder} holds no tensor of {type(model).__name__}; it has "
                f"{_listed(sorted(self._weights.shapes))}: choose the folder of this model"
            )
        if (refused and not allow_missing) or (unused and not allow_unused):
            raise self._mismatch(
                model, [] if allow_missing else refused, [] if allow_unused else unused
            )
        self._model, self._sources, self._names = model, sources, {}
        self.names_of(model)
        self._settle_tied(model, groups)
        for name, module, key, tensor in _entries(model):
            if self._instead.get(name, name) in sources.shapes:
                self._check_tensor(name, whole_shape(module, key, tensor), tensor)
            else:
                self._new[name] = (_alone(module), key)
        return WeightReport(tuple(missing), tuple(unused))

    def names_of(self, model: nn.Module) -> dict[nn.Module, str]:
        """The names of a model's modules, which `fill` accepts from now on.

        Call it where modules of the model that was checked have been replaced and `fill` is given
        some of another model, a pipeline stage that is none of its modules, say.

        Args:
            model: Its modules have the names that they have in the whole model.

        Returns:
            {module: name}.
        """
        found = {module: name for name, module in reversed(list(model.named_modules()))}
        self._names.update(found)
        return found

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Fill the module's own parameters and persistent buffers, not those of its children: for
        `ZeroConfig(initialize=weights.fill)`.

        It takes memory for one whole tensor of the files at a time (for a few of those that an
        operation of transformers makes one of, as of experts).

        Args:
            module: Of the model that was checked, with memory; cut or not.

        Raises:
            HubError: A tensor has a NaN or Inf, or is too large for the dtype of the module; a file
                is damaged; the module is not of the model.
        """
        for name, key, tensor in self._own(module):
            if tensor.is_meta:
                raise HubError(
                    f"{name} has no memory yet; call to_empty(device=...) first, or give fill to "
                    "ZeroConfig(initialize=...)"
                )
            copy_part(module, key, tensor, self._whole(name, tensor.dtype))

    @torch.no_grad()
    def fill_buffers(self, model: nn.Module) -> None:
        """Fill the persistent buffers of all modules, as far as the files have them.

        Args:
            model: That was checked.

        Raises:
            HubError: As of `fill`.
        """
        for module in model.modules():
            for name, key, tensor in self._own(module):
                if key in module._buffers and name not in self._new and not tensor.is_meta:
                    copy_part(module, key, tensor, self._whole(name, tensor.dtype))

    def _own(self, module: nn.Module) -> list[Own]:
        if module not in self._names and self._model is not None:
            self.names_of(self._model)  # modules were replaced since
        if module not in self._names:
            raise HubError(
                f"a {type(module).__name__} is none of the modules of the model that was checked; "
                "call check(model) first, and names_of(model) where it was cut into others"
            )
        prefix = self._names[module]
        return [(f"{prefix}.{key}" if prefix else key, key, t) for key, t in _own_tensors(module)]

    def _whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor of the model, checked."""
        if name in self._new:
            return _first_values(self._model, name, *self._new[name])
        there = self._instead.get(name, name)
        if there not in self._sources.shapes:
            raise HubError(
                f"{name} was not there when the model was checked; call check(model) again after "
                "a module was added"
            )
        found = self._sources.read(there, self._read, self._model)
        for other in self._copies.pop(there, ()):
            self._check_copy(there, other, found)
        if found.numel() and dtype.is_floating_point:
            _check_range(there, self._files(there), found, dtype)
        return found

    def _read(self, name: str) -> Tensor:
        shape = self._weights.shapes[name]
        found = self._weights.read(name, ((0,) * len(shape), shape))
        if found.numel() and found.is_floating_point():
            _check_range(name, str(self._weights._files[name]), found, found.dtype)
        return found

    def _files(self, name: str) -> str:
        names = self._sources.files_names(name)
        return ", ".join(sorted({str(self._weights._files[each]) for each in names}))

    def _check_copy(self, name: str, other: str, found: Tensor) -> None:
        """HubError where the files hold two tensors that the model ties, and they differ."""
        theirs = self._sources.names.get(other)
        if theirs is None:
            return
        shape = self._weights.shapes[theirs]
        rows = shape[0] if shape else 1
        each = max(1, BLOCK_BYTES * rows // max(1, found.nbytes))
        same = shape == tuple(found.shape)
        for start in range(0, rows, each) if same else ():
            count = min(each, rows - start)
            box = ((start, *(0,) * (len(shape) - 1)), (count, *shape[1:])) if shape else ((), ())
            part = found.narrow(0, start, count) if shape else found
            same = same and torch.equal(self._weights.read(theirs, box), part)
        if not same:
            raise HubError(
                f"{theirs} in {self._files(other)} differs from {self._sources.names[name]}, but "
                "config.json ties them; set tie_word_embeddings to false there, or leave one of "
                "them out of the files"
            )

    def _settle_tied(self, model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
        targets: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        self._instead, self._copies, self._new = {}, {}, {}
        for names in groups:
            held = [name for name in names if name in self._sources.shapes]
            if not held or len(names) == 1:
                continue
            first = next((name for name in held if name not in targets), held[0])
            self._instead.update(dict.fromkeys(names, first))
            if others := [name for name in held if name != first]:
                self._copies[first] = others

    def _check_tensor(self, name: str, shape: tuple[int, ...], tensor: Tensor) -> None:
        there = self._instead.get(name, name)
        found = self._sources.shapes[there]
        files = self._files(there)
        if found != shape:
            raise HubError(
                f"{there} is {list(found)} in {files}, but {list(shape)} in the model; one of them "
                "is of another size: give empty_model the config.json beside the files"
            )
        for each in self._sources.files_names(there):
            dtype = self._weights.dtypes[each]
            if tensor.is_floating_point() and dtype not in FLOATING:
                raise HubError(
                    f"{each} is of {dtype} in {files}; pyops reads {', '.join(FLOATING)}: choose a "
                    "checkpoint that is not quantized"
                )

    def _mismatch(
        self, model: nn.Module, missing: Sequence[str], unused: Sequence[str]
    ) -> HubError:
        what = " and ".join(
            f"{verb} {len(found)} tensors ({_listed(found)})"
            for verb, found in (("lacks", missing), ("has besides", unused))
            if found
        )
        fixes = ["choose the folder of this model"]
        fixes += ["allow_missing=True gives them first values"] if missing else []
        fixes += ["allow_unused=True leaves the others unread"] if unused else []
        return HubError(f"{self.folder} {what} of {type(model).__name__}; {', or '.join(fixes)}")


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The module's own parameters and persistent buffers."""
    buffers = {
        key: buffer
        for key, buffer in module._buffers.items()
        if key not in module._non_persistent_buffers_set
    }
    return [(key, t) for key, t in {**module._parameters, **buffers}.items() if t is not None]


def _entries(model: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
    """(name, module, name in the module, tensor) of what state_dict has."""
    return [
        (f"{path}.{key}" if path else key, module, key, tensor)
        for path, module in model.named_modules(remove_duplicate=False)
        for key, tensor in _own_tensors(module)
    ]


def _tied_groups(model: nn.Module) -> list[list[str]]:
    """The names of each tensor."""
    found: dict[int, list[str]] = {}
    for name, _, _, tensor in _entries(model):
        found.setdefault(id(tensor), []).append(name)
    return list(found.values())


def _unused(model: nn.Module, sources: Sources) -> list[str]:
    """Names in the files that the model does not have, and that say something."""
    ignored = ignorable(model)
    computed = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return [
        name
        for name, renamed in sources.unknown.items()
        if renamed not in computed and not ignored.search(name) and not ignored.search(renamed)
    ]


def _check_range(name: str, files: str, found: Tensor, dtype: torch.dtype) -> None:
    """HubError unless all are finite, also in this dtype. aminmax makes no copy, and passes NaN
    on."""
    low, high = (float(each) for each in torch.aminmax(found.detach()))
    if not isfinite(low) or not isfinite(high):
        raise HubError(
            f"{name} in {files} has a NaN or Inf; the training that wrote it went wrong: choose an "
            "earlier checkpoint"
        )
    if max(abs(low), abs(high)) > torch.finfo(dtype).max:
        raise HubError(
            f"{name} in {files} has {low if -low > high else high:g}, which is Inf in {dtype}; "
            "use bfloat16 or float32"
        )


def _alone(module: nn.Module) -> nn.Module:
    """The module as it is now without its children, on the meta device."""
    found = copy.copy(module)
    found._modules = {}
    return copy.deepcopy(found).to("meta")


def _first_values(model: Any, name: str, module: nn.Module, key: str) -> Tensor:
    """What the model's class begins with, the same on every rank: drawn from torch's seed and the
    name."""
    made = copy.deepcopy(module).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() ^ zlib.crc32(name.encode()))
        if callable(reset := getattr(made, "reset_parameters", None)):
            reset()
        if callable(draw := getattr(model, "_init_weights", None)):
            draw(made)
    found = {**made._parameters, **made._buffers}[key]
    assert found is not None
    return found.detach()
