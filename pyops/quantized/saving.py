"""save and load: a converted model as a folder, for any number of tensor-parallel ranks.

    folder/quantized.json           the scheme of each converted layer
    folder/quantized.safetensors    codes, scales, zero points and sums; all other parameters and
                                    buffers as they are

A tensor that ranks share is whole in the file. `load` takes a model of the same architecture, on
any layout, with any numbers: its layers are replaced as the folder says, then all is filled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pyops.checkpoint.writing import write_folder
from pyops.comm.agreement import gather, on_first_rank, ranks_agree
from pyops.flat import Placement
from pyops.ops.memory import require_memory
from pyops.quantized.conversion import check_layer, nearest_codes, replace_layer
from pyops.quantized.formats import FP8, Format, Int4, Int8, IntN, Scheme
from pyops.quantized.layers import is_conv1d, linear_layers, ranks_of, upright_weight
from pyops.quantized.linear import QuantizedLinear
from pyops.tensor_parallel import Ranks, RanksLike

__all__ = ["load", "save"]

CONFIG, WEIGHTS = "quantized.json", "quantized.safetensors"
_Shapes: TypeAlias = dict[str, tuple[tuple[int, ...], str]]
"""Of each tensor of a file its shape, and its dtype as safetensors names it."""
_FORMATS = {kind.__name__: kind for kind in (Int8, Int4, IntN, FP8)}


def _written(format: Format | None) -> dict[str, Any] | None:
    return None if format is None else {"format": type(format).__name__, **asdict(format)}


def _read_format(stored: dict[str, Any] | None) -> Any:
    if stored is None:
        return None
    fields = dict(stored)
    return _FORMATS[fields.pop("format")](**fields)


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Placement | None]]:
    """(name, module, key, placement) of what a folder holds: each parameter once, and the buffers
    that a state_dict has."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        places = dict(getattr(module, "placements", {}))
        if isinstance(module, QuantizedLinear):
            places |= module.code_placements
        own = module.state_dict(prefix="", keep_vars=True)
        for key, held in own.items():
            if "." in key or not isinstance(held, Tensor) or id(held) in seen:
                continue
            seen.add(id(held))
            yield (f"{prefix}.{key}" if prefix else key), module, key, places.get(key)


def _ranks(model: nn.Module, group: RanksLike) -> Ranks:
    return ranks_of(model) if group is None else Ranks.of(group)


@torch.no_grad()
def save(model: nn.Module, folder: Path | str, *, group: RanksLike = None) -> None:
    """Write a converted model. A collective of the ranks that share the model; rank 0 writes.

    Args:
        model: With layers that `convert` made.
        folder: Written beside its place and renamed; an earlier save there is replaced.
        group: The ranks that share the model's layers; None: those that its layers name.

    Raises:
        ValueError: On every rank, for a model without converted layers, or a folder that holds
            something else.
        RuntimeError: For parameters that ZeRO stage 3 has shared out: save within
            optimizer.whole_parameters().
    """
    ranks, folder = _ranks(model, group), Path(folder)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    with ranks_agree(ranks.group):
        if not layers:
            raise ValueError(
                f"quantized.save: {type(model).__name__} has no converted layer; call convert first"
            )
        _check_place(folder)
        for name, parameter in model.named_parameters():
            require_memory(parameter, name)
    found: dict[str, Tensor] = {}
    for name, module, key, place in _tensors(model):
        if key == "sums":
            continue  # made anew from the codes
        whole = _whole(getattr(module, key).detach(), place, ranks)
        if whole is not None:
            found[name] = whole.cpu().contiguous().clone()
    schemes = {
        name: {
            "weights": _written(layer.scheme.weights),
            "activations": _written(layer.scheme.activations),
        }
        for name, layer in layers.items()
    }

    def fill(aside: Path) -> None:
        save_file(found, aside / WEIGHTS, metadata={"format": "pt"})
        (aside / CONFIG).write_text(json.dumps({"version": 1, "layers": schemes}, indent=1) + "\n")

    on_first_rank(lambda: write_folder(folder, fill, who="quantized.save"), group=ranks.group)


def _check_place(folder: Path) -> None:
    if folder.exists():
        there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [folder.name]
        foreign = [name for name in there if name not in (CONFIG, WEIGHTS)]
        if foreign:
            raise ValueError(
                f"quantized.save: {folder} is there already and holds {', '.join(foreign[:3])}; a "
                "save replaces what it wrote and nothing else: name another place"
            )


def _whole(local: Tensor, place: Placement | None, ranks: Ranks) -> Tensor | None:
    """The whole tensor on rank 0, None on others. Collective where it is cut."""
    if ranks.size == 1 or place is None or not place.cuts:
        return local if ranks.rank == 0 else None
    places = gather(place, group=ranks.group)
    raw = local.contiguous().view(torch.uint8)
    everyone = ranks.gather(raw.reshape(1, -1)).wait()
    if ranks.rank:
        return None
    parts = [row.view(local.dtype).view(place.local_shape) for row in everyone]
    return place.joined(parts, places)


@torch.no_grad()
def load(model: nn.Module, folder: Path | str, *, group: RanksLike = None) -> nn.Module:
    """Make a model what `save` wrote. A collective of the ranks that share the model.

    Args:
        model: Of the architecture that was saved, converted alike or not at all, on any number of
            ranks. Its numbers are replaced, in place.
        folder: That `save` wrote.
        group: As of `save`.

    Returns:
        The model.

    Raises:
        ValueError: On every rank, for files that are missing or damaged, layers that the model does
            not have, other shapes, or a model that was converted by another scheme; the model is
            then what it was.
    """
    ranks, folder = _ranks(model, group), Path(folder)
    with ranks_agree(ranks.group):
        schemes, shapes = _read(folder)
        _check_model(model, folder, schemes, shapes)
    layers = linear_layers(model)
    for name, scheme in schemes.items():
        if name in layers:
            upright_weight(layers[name]).zero_()  # may be memory that was never written
            codes = nearest_codes(layers[name], scheme.weights)
            replace_layer(model, name, scheme, codes, _no_range(scheme, codes.scales))
    with ranks_agree(ranks.group), safe_open(folder / WEIGHTS, "pt") as opened:
        for name, module, key, place in _tensors(model):
            if key == "sums":
                continue
            whole = opened.get_tensor(name)
            held: Tensor = getattr(module, key)
            held.copy_(whole if place is None else place.take(whole))
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.renew_sums()
    return model


def _no_range(scheme: Scheme, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """A place for the range of inputs, where a scheme has one."""
    if scheme.activations is None or scheme.activations.per != "tensor":
        return None
    return like.new_zeros(()), like.new_zeros(())


def _read(folder: Path) -> tuple[dict[str, Scheme], _Shapes]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder / name} does not exist; name a folder that pyops.quantized.save wrote"
            )
    try:
        stored = json.loads((folder / CONFIG).read_text())
        schemes = {
            name: Scheme(_read_format(layer["weights"]), _read_format(layer["activations"]))
            for name, layer in stored["layers"].items()
        }
        with safe_open(folder / WEIGHTS, "pt") as opened:
            names = list(opened.keys())
            parts = {name: opened.get_slice(name) for name in names}
            shapes = {
                name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()
            }
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        SafetensorError,
    ) as error:
        raise ValueError(
            f"{folder} is damaged ({type(error).__name__}: {error}); save the model anew"
        ) from None
    return schemes, shapes


def _check_model(
    model: nn.Module,
    folder: Path,
    schemes: dict[str, Scheme],
    shapes: _Shapes,
) -> None:
    """Raise ValueError unless the folder is of this model."""
    layers = linear_layers(model)
    modules = dict(model.named_modules())
    for name, scheme in schemes.items():
        there = modules.get(name)
        if isinstance(there, QuantizedLinear):
            if there.scheme != scheme:
                raise ValueError(
                    f"{folder} has codes of {name} by {scheme}, and the model was converted by "
                    f"{there.scheme}; load them into a model that was not converted"
                )
        elif name in layers:
            check_layer(name, layers[name], scheme, finite=False)
        else:
            raise ValueError(
                f"{folder} has codes of {name}, which {type(model).__name__} does not have; load "
                "them into the architecture that was saved"
            )
    for name, module in modules.items():
        if isinstance(module, QuantizedLinear) and name not in schemes:
            raise ValueError(
                f"{folder} has no codes of {name}, which the model has converted; load it into a "
                "model that was not converted"
            )
    _check_shapes(model, folder, schemes, shapes)


def _check_shapes(
    model: nn.Module,
    folder: Path,
    schemes: dict[str, Scheme],
    shapes: _Shapes,
) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for name, module, key, place in _tensors(model):
        layer = name.rpartition(".")[0]
        if key == "weight" and layer in schemes:  # not converted yet
            own: Tensor = getattr(module, key)
            whole = tuple(own.shape) if place is None else place.global_shape
            upright = whole[::-1] if is_conv1d(module) else whole
            for part, (wanted, kinds) in _of_layer(upright, schemes[layer]).items():
                stored, kind = shapes.get(f"{layer}.{part}", (None, ""))
                if stored != wanted or kind not in kinds:
                    said = list(stored or ())
                    raise ValueError(
                        f"{folder} has {part} {said} {kind} of {layer}, whose weight is "
                        f"{list(whole)}; load them into the architecture that was saved"
                    )
        elif key != "sums":
            held: Tensor = getattr(module, key)
            expected[name] = tuple(held.shape) if place is None else place.global_shape
    for name, shape in expected.items():
        found = shapes.get(name, (None, ""))[0]
        if found != shape:
            raise ValueError(
                f"{folder} has {name} of shape {found}, the model of {shape}; load it "
                "into the architecture that was saved"
            )


def _of_layer(
    upright: tuple[int, ...], scheme: Scheme
) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shapes, and dtypes as safetensors names them, of what a layer of codes has in the file.

    Args:
        upright: The shape of its whole weight, [.., out, in].
        scheme: Of its codes.
    """
    weights, (*lead, width) = scheme.weights, upright
    packed = -(-width // 2) if isinstance(weights, Int4) else width
    groups = [] if weights.group is None else [width // weights.group]
    kinds: tuple[str, ...] = ("F8_E4M3",) if isinstance(weights, FP8) else ("U8", "I8")
    found: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "codes": ((*lead, packed), kinds),
        "scales": ((*lead, *groups), ("F32",)),
    }
    if not weights.symmetric:
        found["zero_points"] = (*lead, *groups), ("I32",)
    if scheme.activations is not None and scheme.activations.per == "tensor":
        found["input_range"] = (2,), ("F32",)
    return found
