"""A model of which each rank has a part, and the folders of torch.distributed.checkpoint: weights
with the names, shapes and layouts of the uncut model.

    tp 0, tp 1   q_proj, rows of it  -->  q_proj            --dcp.save-->   what plain torch and
                 [3, 2 heads, D]     <--  [D, 3 * 4 heads]  <--dcp.load--   FSDP2 read and write
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from pyops.checkpoint import Reader, save
from pyops.checkpoint.distributed import INDEX, TORCH_ERRORS, TorchFolder, last_line
from pyops.checkpoint.writing import replace_folder
from pyops.comm.agreement import gather, ranks_agree
from pyops.hub.folder_files import HubError
from pyops.hub.pretrained.layouts import RelaidTensor, gathered, placement_of, whole_shape
from pyops.hub.pretrained.saving import Position
from pyops.mesh import ALONE, Mesh
from pyops.tensor_parallel.convert.module_swap import laid_back, laid_out

__all__ = ["export_dcp", "stored_states", "stored_weights"]

MODEL = "model"
Held = tuple[str, nn.Module, str, Tensor]


def _held(model: nn.Module) -> Iterator[Held]:
    """(name, module, name in the module, this rank's part) of what state_dict has, tied ones under
    each of their names."""
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None and key not in module._non_persistent_buffers_set:
                yield (f"{path}.{key}" if path else key), module, key, tensor


@torch.no_grad()
def export_dcp(
    model: nn.Module,
    folder: Path | str,
    *,
    mesh: Mesh | None = None,
    states: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
) -> None:
    """Write {"model": the model's state_dict} as torch.distributed.checkpoint.save does, whole
    tensors. Collective: every rank must call it.

    One rank of each pipeline stage holds the stage's whole tensors in host memory meanwhile. At
    stage 3 of ZeRO call it within `optimizer.whole_parameters()`.

    Args:
        model: This rank's part, its modules named as in the whole model.
        folder: Written beside its place and renamed; such a folder there is replaced.
        mesh: Of all ranks; None: this process has the whole model.
        states: {"optim": ZeroOptimizer.state_dict()["state"]}, say: {name of a parameter: {name of
            a state: this rank's part}} is written as {"optim": {"state": ...}} beside the model;
            meanwhile the states are in a second folder, too. None: no states.

    Raises:
        HubError: On every rank, for a folder of something else, and a disk that is full.
    """
    position, folder = Position.of(mesh), Path(folder)
    aside = folder.with_name(folder.name + ".tmp")
    with ranks_agree(position.group):
        _check_folder(folder)
        if position.first:
            shutil.rmtree(aside, ignore_errors=True)
    whole: dict[str, Tensor] = {}
    copied: dict[int, Tensor] = {}
    for name, module, key, tensor in _held(model) if position.writes_part else ():
        if id(tensor) not in copied:
            found = gathered(module, key, tensor, position.ranks)
            copied[id(tensor)] = tensor if found is None else found.cpu().clone()
        if position.writes:
            whole[name] = copied[id(tensor)]
    del copied
    optimizers = {
        key: {"state": _whole_states(model, folder, given, position)}
        for key, given in (states or {}).items()
    }
    with ranks_agree(position.group):
        try:
            state = {MODEL: whole, **optimizers} if whole else {}
            dcp.save(state, checkpoint_id=aside, no_dist=mesh is None or mesh.device_mesh is None)
        except TORCH_ERRORS as error:
            raise HubError(
                f"{folder} can't be written ({last_line(error)}); make room or choose another place"
            ) from None
    with ranks_agree(position.group):
        if position.first:
            replace_folder(folder, aside)


def _whole_states(
    model: nn.Module,
    folder: Path,
    states: Mapping[str, Mapping[str, Any]],
    position: Position,
) -> dict[str, dict[str, Tensor]]:
    """The states of this pipeline stage's parameters as the uncut model's optimizer has them, on
    the rank that writes; collective. What the ranks have of them is put together in a folder."""
    parts = folder.with_name(folder.name + ".states")
    save(parts, {"state": dict(states)})
    found: dict[str, dict[str, Tensor]] = {}
    try:
        with ranks_agree(position.group):
            if position.writes:
                stored = Reader(parts).state()  # without the other ranks, which have no part here
                for name, module, key, _ in _held(model):
                    place = placement_of(module, key)
                    for state, value in stored["state"].get(name, {}).items():
                        whole = value.read() if hasattr(value, "read") else torch.as_tensor(value)
                        if place is not None and whole.shape == place.global_shape:
                            whole = laid_back(module, whole)
                        found.setdefault(name, {})[state] = whole.contiguous()
    finally:
        with ranks_agree(position.group):
            if position.first:
                shutil.rmtree(parts, ignore_errors=True)
    return found


def _check_folder(folder: Path) -> None:
    """HubError for a folder with anything but such a checkpoint."""
    if not os.path.lexists(folder):
        return
    there = sorted(os.listdir(folder)) if folder.is_dir() else [folder.name]
    foreign = [name for name in there if name != INDEX and not name.endswith(".distcp")]
    if foreign:
        raise HubError(
            f"{folder} is there already and holds {', '.join(foreign[:3])}; an export replaces a "
            "folder of torch.distributed.checkpoint and nothing else: remove it, or name another "
            "place"
        )


def _stored_weight(stored: TorchFolder, name: str, held: Held) -> RelaidTensor:
    """A tensor of the folder, which has no checksums, as a module of the cut model lays it out."""
    _, module, key, tensor = held
    place, dtype = placement_of(module, key), stored.tensors[name][1]
    if place is None:
        return RelaidTensor(lambda: stored.read(name), tuple(tensor.shape), dtype)
    return RelaidTensor(
        lambda: laid_out(module, stored.read(name), place), place.global_shape, dtype
    )


def stored_weights(
    model: nn.Module, folder: Path | str, *, key: str | None = None, mesh: Mesh | None = None
) -> dict[str, RelaidTensor]:
    """What this rank needs of a folder of torch.distributed.checkpoint, for
    `ZeroOptimizer.load_model_state_dict`. Collective: every rank must call it.

    Args:
        model: This rank's part, its modules named as in the whole model.
        folder: What dcp.save wrote of model.state_dict(), by any layout of ranks.
        key: The path of the model's state in what was saved, "model" for {"model": ...}; "" for
            the whole. None: whichever of these two has the model's names.
        mesh: Of all ranks; None: this process has the whole model.

    Returns:
        {name in the model: tensor}.

    Raises:
        CheckpointError: The folder can't be read.
        HubError: On every rank, for weights of another model.
    """
    position = Position.of(mesh)
    held = {each[0]: each for each in _held(model)}
    stages = gather(sorted(held), group=ALONE if mesh is None else mesh.group("pp") or ALONE)
    names = {name for stage in stages for name in stage}
    with ranks_agree(position.group):
        stored = TorchFolder(folder)
        prefixes = [f"{MODEL}.", ""] if key is None else [f"{key}." if key else ""]
        prefix = max(
            prefixes, key=lambda each: sum(each + name in stored.tensors for name in names)
        )
        found = {
            name.removeprefix(prefix): name for name in stored.tensors if name.startswith(prefix)
        }
        _check_names(folder, model, names, found)
        for name, module, own, tensor in held.values():
            there, here = stored.tensors[found[name]][0], whole_shape(module, own, tensor)
            if there != here:
                raise HubError(
                    f"{name} is {list(there)} in {folder}, but {list(here)} in the model; choose "
                    "the folder of this model"
                )
    return {name: _stored_weight(stored, found[name], each) for name, each in held.items()}


def stored_states(
    model: nn.Module, folder: Path | str, *, key: str, mesh: Mesh | None = None
) -> dict[str, dict[str, Any]]:
    """What this rank's optimizer needs of the states in a folder of torch.distributed.checkpoint,
    for `ZeroOptimizer.load_state_dict`. Collective: every rank must call it.

    Args:
        model: This rank's part, its modules named as in the whole model.
        folder: Of which `key` is what torch.distributed.checkpoint.state_dict.
            get_optimizer_state_dict gave.
        key: The path of the states in what was saved, such as "optim".
        mesh: Of all ranks; None: this process has the whole model.

    Returns:
        {name of a parameter: {name of a state: tensor}}.

    Raises:
        CheckpointError: The folder can't be read.
        HubError: On every rank, where a parameter that is trained has no states, or they are of
            another model.
    """
    position = Position.of(mesh)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    found: dict[str, dict[str, Any]] = {}
    with ranks_agree(position.group):
        stored = TorchFolder(folder)
        for each in _held(model):
            name, module, own, tensor = each
            if name not in trained:
                continue
            prefix, whole = f"{key}.state.{name}.", whole_shape(module, own, tensor)
            of_parameter = {
                there.removeprefix(prefix): there
                for there in stored.tensors
                if there.startswith(prefix)
            }
            if not of_parameter:
                raise HubError(
                    f"{folder} has no states of {name} under {key!r}; name where the optimizer's "
                    "state_dict is in it, or leave optimizer= out to take weights alone"
                )
            found[name] = {}
            for state, there in of_parameter.items():
                shape = stored.tensors[there][0]
                if shape == whole:
                    found[name][state] = _stored_weight(stored, there, each)
                elif math.prod(shape) == 1:  # a count of steps
                    found[name][state] = stored.read(there)
                else:
                    raise HubError(
                        f"{there} is {list(shape)} in {folder}, of a parameter {list(whole)}; "
                        "choose the folder of this model, by an optimizer that keeps a number for "
                        "each of the parameter's"
                    )
    return found


def _check_names(
    folder: Path | str, model: nn.Module, names: set[str], found: dict[str, str]
) -> None:
    missing, unused = sorted(names - set(found)), sorted(set(found) - names)
    if missing or unused:
        what = [f"lacks {', '.join(missing[:3])}"] if missing else []
        what += [f"has besides {', '.join(unused[:3])}"] if unused else []
        raise HubError(
            f"{folder} {' and '.join(what)}, of {type(model).__name__}; choose the folder of this "
            "model, or say where in it the model is: key='model' for {'model': state_dict}"
        )
