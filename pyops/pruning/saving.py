"""A pruned model in a file, with its masks; in the form that fits how it is pruned.

    form        of a parameter with a mask                                    bytes, n weights of 4
    "dense"     the tensor, bits                                              4 n + n / 8
    "packed"    bits, and the values that are alive in row-major order        n / 8 + 4 keep
    "2:4"       values [rows, inputs / 2], two indices of 2 bits a group      2 n + n / 8
    "csr"       row starts, columns, values                                   8 keep + 4 (rows + 1)

All else is stored as it is. A file is of the whole model, whatever ranks shared it, and is loaded
on any number of them. A weight may be 0 and alive: masks are stored, and never made of zeros.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pyops.checkpoint.writing import write_folder
from pyops.comm.agreement import gather, on_first_rank, ranks_agree
from pyops.flat import Placement
from pyops.mesh import ALONE
from pyops.ops.memory import require_memory
from pyops.pruning.masks import Masks, masks_of, pack_bits, unpack_bits
from pyops.pruning.nm import input_dim
from pyops.tensor_parallel import Ranks, RanksLike

__all__ = ["FORMS", "Loaded", "form_bytes", "load", "save", "to_semi_structured"]

FILE, NOTE = "pruned.safetensors", "pyops_pruning"
VERSION = 1
ORDER = "order:"  # before the name of channels


@dataclass(frozen=True)
class Loaded:
    """What a file had besides the weights."""

    form: str
    """In which it was stored."""
    masks: Masks | None
    """Of the model that was loaded; None where it had none."""
    orders: Mapping[str, Tensor]
    """Of channels that were permuted before, for `rearrange` with their `inverse`."""


def _rows(x: Tensor) -> Tensor:
    """[rows, inputs] of a weight."""
    return x.movedim(input_dim(x), -1).flatten(0, -2)


def _unrows(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `_rows`."""
    like = torch.empty(shape, device="meta")
    dim = input_dim(like)
    moved = like.movedim(dim, -1).shape
    return rows.view(moved).movedim(-1, dim).contiguous()


def _dense(w: Tensor, alive: Tensor) -> dict[str, Tensor]:
    return {"": w, ":bits": pack_bits(alive)}


def _from_dense(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    w = parts[""]
    return w, unpack_bits(parts[":bits"], w.numel()).view(shape)


def _packed(w: Tensor, alive: Tensor) -> dict[str, Tensor]:
    return {":values": w[alive], ":bits": pack_bits(alive)}


def _from_packed(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    values, numel = parts[":values"], torch.Size(shape).numel()
    alive = unpack_bits(parts[":bits"], numel).view(shape)
    if len(values) != int(alive.sum()):
        raise IndexError(f"{len(values)} values for {int(alive.sum())} that are alive")
    w = values.new_zeros(shape)
    w[alive] = values
    return w, alive


def _two_of_four(w: Tensor, alive: Tensor) -> dict[str, Tensor]:
    rows, kept = _rows(w), _rows(alive)
    index = kept.nonzero()[:, 1].view(len(rows), -1)  # two of each group, in their order
    places = (index % 4).to(torch.uint8)
    short = -places.shape[1] % 4
    places = nn.functional.pad(places, (0, short)).view(len(rows), -1, 4)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    indices = (places << shifts).sum(-1, dtype=torch.uint8)
    return {":values": rows.gather(1, index), ":indices": indices}


def _from_two_of_four(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    values = parts[":values"]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    places = (parts[":indices"][..., None] >> shifts) & 3
    places = places.flatten(1)[:, : values.shape[1]].long()
    index = places + torch.arange(values.shape[1]) // 2 * 4
    rows = values.new_zeros(len(values), 2 * values.shape[1])
    alive = torch.zeros(rows.shape, dtype=torch.bool)
    return (
        _unrows(rows.scatter(1, index, values), shape),
        _unrows(alive.scatter(1, index, True), shape),
    )


def _csr(w: Tensor, alive: Tensor) -> dict[str, Tensor]:
    rows, kept = _rows(w), _rows(alive)
    starts = nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
    wide = torch.int32 if kept.numel() < 2**31 else torch.int64
    columns = kept.nonzero()[:, 1].to(torch.int32)
    return {":rows": starts.to(wide), ":columns": columns, ":values": rows[kept]}


def _from_csr(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    starts, columns, values = parts[":rows"].long(), parts[":columns"].long(), parts[":values"]
    inputs = torch.Size(shape).numel() // max(len(starts) - 1, 1)
    row = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    w = values.new_zeros(len(starts) - 1, inputs)
    alive = torch.zeros(w.shape, dtype=torch.bool)
    w[row, columns], alive[row, columns] = values, True
    return _unrows(w, shape), _unrows(alive, shape)


Parts = dict[str, Tensor]
FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Parts], Callable[..., tuple[Tensor, Tensor]]]] = {
    "dense": (_dense, _from_dense),
    "packed": (_packed, _from_packed),
    "2:4": (_two_of_four, _from_two_of_four),
    "csr": (_csr, _from_csr),
}


def form_bytes(weight: Tensor, alive: Tensor, form: str) -> int:
    """Bytes of a parameter with a mask in a form.

    Args:
        weight: The parameter.
        alive: bool, its mask.
        form: One of `FORMS`.
    """
    return sum(
        part.numel() * part.element_size() for part in FORMS[form][0](weight, alive).values()
    )


@torch.no_grad()
def save(
    model: nn.Module,
    folder: Path | str,
    *,
    form: str = "packed",
    group: RanksLike = None,
    orders: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a model and its masks. A collective of the ranks that share the model; the first one
    writes, and holds the whole model meanwhile.

    Args:
        model: With masks (`magnitude`, `nm_masks`, `SparseTraining.finish`).
        folder: Written beside its place and renamed; an earlier save there is replaced.
        form: "dense", "packed", "2:4" or "csr".
        group: The ranks that share the model's layers; None: those that a model of pyops was made
            with, or this process.
        orders: `Permuted.orders`, where channels were permuted.

    Raises:
        ValueError: On every rank, before anything is written: for an unknown form, a model without
            masks, a mask that is not 2 of each 4 inputs for "2:4", a folder that holds something
            else.
        RuntimeError: For parameters that ZeRO stage 3 has shared out: save within
            optimizer.whole_parameters().
    """
    ranks, folder = _ranks(model, group), Path(folder)
    with ranks_agree(ranks.group):
        masks = _check_save(model, folder, form)
    places = _places(model)
    tensors: Parts = {}
    shapes: dict[str, list[int]] = {}
    for name, value in _state(model).items():
        whole = _whole(value.detach(), places.get(name), ranks)
        if name not in masks:
            tensors[name] = whole.cpu().contiguous()
            continue
        mask = masks[name].alive().to(torch.uint8).to(value.device)
        alive = _whole(mask, places.get(name), ranks).bool().cpu()
        shapes[name] = list(whole.shape)
        for key, part in FORMS[form][0](whole.cpu(), alive).items():
            tensors[name + key] = part.contiguous()
    for name, order in (orders or {}).items():
        tensors[ORDER + name] = order.cpu()
    note = json.dumps({"version": VERSION, "form": form, "shapes": shapes})

    def fill(aside: Path) -> None:
        save_file(tensors, aside / FILE, metadata={"format": "pt", NOTE: note})

    on_first_rank(lambda: write_folder(folder, fill, who="pruning.save"), group=ranks.group)


def _ranks(model: nn.Module, group: RanksLike) -> Ranks:
    found = getattr(getattr(model, "layout", None), "ranks", None)
    if group is None and isinstance(found, Ranks):
        return found
    return Ranks.of(ALONE if group is None else group)


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, each once, and the buffers that are saved."""
    named = dict(model.named_parameters())
    others = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {n: v for n, v in model.state_dict(keep_vars=True).items() if n not in others}
    return {**named, **buffers}


def _places(model: nn.Module) -> dict[str, Placement]:
    """Of parameters, and of buffers that lie as the parameters of their module do."""
    found = Placement.of(model)
    for prefix, module in model.named_modules():
        place = found.get(f"{prefix}.weight")
        for name, buffer in module.named_buffers(recurse=False):
            if place is not None and tuple(buffer.shape) == place.local_shape:
                found[f"{prefix}.{name}"] = place
    return found


def _whole(local: Tensor, place: Placement | None, ranks: Ranks) -> Tensor:
    """What all ranks have together, on each of them."""
    if place is None or not place.cuts or ranks.size == 1:
        return local if place is None else place.part(local)
    parts = ranks.gather(local.contiguous()).wait().chunk(ranks.size)
    places = gather(place, group=ranks.group) if len(place.cuts) > 1 else None
    return place.joined(parts, places)


def _check_save(model: nn.Module, folder: Path, form: str) -> Mapping[str, Any]:
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; choose one of {', '.join(FORMS)}")
    masks = masks_of(model)
    if not masks:
        raise ValueError(
            f"{type(model).__name__} has no masks; make them by magnitude, nm_masks or finish() of "
            "sparse_training, or save it as a dense model by pyops.checkpoint or pyops.hub"
        )
    for name, parameter in model.named_parameters():
        require_memory(parameter, name)
    for name, mask in masks.items() if form == "2:4" else ():
        rows = _rows(mask.alive())
        if rows.shape[1] % 4 or not bool((rows.unflatten(1, (-1, 4)).sum(2) == 2).all()):
            raise ValueError(
                f"{name} {mask.shape} is not 2 of each 4 inputs; save it as form='packed', or "
                "prune it by nm_masks"
            )
    if folder.exists():
        there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [folder.name]
        if foreign := [name for name in there if name != FILE]:
            raise ValueError(
                f"{folder} is there already and holds {', '.join(foreign[:3])}; a save replaces "
                "what it wrote and nothing else: name another place"
            )
    return masks


@torch.no_grad()
def load(model: nn.Module, folder: Path | str, *, group: RanksLike = None) -> Loaded:
    """Read what `save` wrote into a model, whole or shared by any number of ranks. A collective of
    these.

    Args:
        model: Of the same shape, without masks.
        folder: That `save` wrote.
        group: As of `save`.

    Raises:
        ValueError: On every rank, before anything is changed: for a file that is missing or
            damaged, and a model of other names or shapes.
    """
    ranks, folder = _ranks(model, group), Path(folder)
    with ranks_agree(ranks.group):
        form, shapes, tensors = _read(folder)
        orders = {n.removeprefix(ORDER): t for n, t in tensors.items() if n.startswith(ORDER)}
        found, masks = _unpacked(folder, form, shapes, tensors)
        state, places = _state(model), _places(model)
        _check_names(folder, state, places, found)
        if masked := list(masks_of(model)):
            raise ValueError(f"{masked[0]} has a mask already; call release() of its masks first")
    alive = {}
    for name, value in state.items():
        place = places.get(name)
        value.copy_(found[name] if place is None else place.take(found[name]))
        if name in masks:
            whole = masks[name].to(torch.uint8)
            alive[name] = (whole if place is None else place.take(whole)).bool()
    return Loaded(form, Masks(model, alive) if alive else None, orders)


def _read(folder: Path) -> tuple[str, dict[str, tuple[int, ...]], Parts]:
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist; name a folder that pyops.pruning.save wrote")
    try:
        with safe_open(path, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            note = json.loads((opened.metadata() or {})[NOTE])
        if note["version"] != VERSION or note["form"] not in FORMS:
            raise ValueError(f"version {note['version']}, form {note['form']!r}")
        shapes = {name: tuple(shape) for name, shape in note["shapes"].items()}
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{path} is damaged, or of another pyops ({error}); save it anew"
        ) from None
    return note["form"], shapes, tensors


def _unpacked(
    folder: Path, form: str, shapes: Mapping[str, tuple[int, ...]], tensors: Parts
) -> tuple[Parts, Parts]:
    """{name: whole tensor}, {name: whole mask}."""
    found = {name: t for name, t in tensors.items() if not name.startswith(ORDER)}
    masks = {}
    for name, shape in shapes.items():
        parts = {
            key.removeprefix(name): found.pop(key)
            for key in list(found)
            if key == name or key.startswith(f"{name}:")
        }
        try:
            found[name], masks[name] = FORMS[form][1](parts, shape)
        except (KeyError, RuntimeError, IndexError) as error:
            raise ValueError(
                f"{folder / FILE} is damaged: {name} is no {form} of {shape} ({error}); save it "
                "anew"
            ) from None
    return found, masks


def _check_names(folder: Path, state: Parts, places: Mapping[str, Placement], found: Parts) -> None:
    for name in {**state, **found}:
        if name not in state or name not in found:
            where = "the file" if name in state else "the model"
            raise ValueError(
                f"{folder / FILE}: {where} has no {name}; load the model that was saved, with the "
                "same configuration"
            )
        place = places.get(name)
        shape = tuple(state[name].shape) if place is None else tuple(place.global_shape)
        if tuple(found[name].shape) != shape or found[name].dtype != state[name].dtype:
            raise ValueError(
                f"{folder / FILE}: {name} is {found[name].dtype} {tuple(found[name].shape)}, in "
                f"the model {state[name].dtype} {shape}; load the model that was saved"
            )


@torch.no_grad()
def to_semi_structured(model: nn.Module) -> list[str]:
    """Give the torch.nn.Linear layers that are 2:4 weights of torch's semi-structured form, which
    CUDA's sparse tensor cores multiply (`torch.sparse.to_sparse_semi_structured`); for inference.
    Unverified on GPU: no speed is promised.

    Args:
        model: On CUDA, in fp16 or bf16, pruned by `nm_masks` or sparse training.

    Returns:
        The names of these layers.

    Raises:
        ValueError: Before anything is changed: for tensors that are not on CUDA, and a model
            without such layers.
    """
    masks = masks_of(model)
    chosen = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and f"{name}.weight" in masks
    }
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no torch.nn.Linear with a mask; prune it by "
            "nm_masks(model, NM(2, 4)) first"
        )
    for name, module in chosen.items():
        if not module.weight.is_cuda:
            raise ValueError(
                f"{name}.weight is on {module.weight.device}, and torch has semi-structured "
                "products on CUDA alone; move the model there, or save it with form='2:4'"
            )
    for module in chosen.values():
        sparse = torch.sparse.to_sparse_semi_structured(module.weight.detach())
        module.weight = nn.Parameter(sparse, requires_grad=False)
    return list(chosen)
