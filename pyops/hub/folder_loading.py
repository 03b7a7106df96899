"""A Hugging Face folder becomes a model of ours, each rank reading the boxes of tensors that it
holds.

    q_proj.weight of the file          rank 0          rank 1
    | group 0 |  rows 0 .. 31    ->    qkv, rows 0 .. 31
    | group 1 |  rows 32 .. 63   ->                    qkv, rows 0 .. 31

No rank reads, or has memory for, more than its own part of a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.agreement import ranks_agree
from pyops.flat import Box, meeting
from pyops.hub.architectures.architecture import Architecture, Entry
from pyops.hub.architectures.pattern_fields import with_pattern
from pyops.hub.architectures.registry import find_architecture
from pyops.hub.config_fields import ConfigFields
from pyops.hub.folder_files import FLOATING, HubError, Weights, floating, open_weights, read_config
from pyops.hub.weight_packing import Piece, Source
from pyops.mesh import ALONE
from pyops.tensor_parallel import Ranks, RanksLike
from pyops.tensor_parallel.grids import Grid

__all__ = ["load", "load_from"]

NAMED = 6  # names of tensors that a message lists


def load(
    folder: Path | str,
    *,
    group: RanksLike | Grid = ALONE,
    sequence_parallel: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> nn.Module:
    """Loads the model of a Hugging Face folder. Collective: every rank of the group must call it.

    Args:
        folder: with config.json and model.safetensors, or several files with their index, of GPT-2,
            Llama, BERT, RoFormer, T5 or ViT; or of a CoAtNet of timm.
        group: the ranks that share the model's layers, each of which reads its own part: a process
            group, a Mesh for its tp group, None for the default group, or, for GPT-2, Llama and
            ViT, a Grid in two or three dimensions. By default this process alone: the model is
            whole.
        sequence_parallel: tokens are cut over the ranks between blocks.
        device: of the parameters.
        dtype: of the parameters; None: as they are in the files.
        **changes: fields of the model's configuration to set otherwise, such as dropout=0.0.

    Returns:
        The model, in eval mode.

    Raises:
        HubError: on every rank, for an architecture that is not known, for tensors that are
            missing, not expected or of another shape, and for files that are damaged.
        ValueError: on every rank, for a field that the configuration does not have, and for heads
            that the ranks can't share.
    """
    shared, folder = group if isinstance(group, Grid) else Ranks.of(group), Path(folder)
    ranks = shared.ranks if isinstance(shared, Grid) else shared
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():  # a save was killed between two renames
        folder = old
    with ranks_agree(ranks.group), open_weights(folder) as weights:
        return load_from(
            weights,
            read_config(folder),
            group=shared,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
            changes=changes,
        )


def load_from(
    weights: Weights,
    values: Mapping[str, Any],
    *,
    group: Ranks | Grid,
    sequence_parallel: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    changes: Mapping[str, Any] | None = None,
) -> nn.Module:
    """As `load`, of opened tensors and the values of config.json; communicates nothing."""
    architecture = find_architecture(values)
    config = _configuration(architecture, values, weights, changes or {})
    if dtype is None:
        found = floating(weights.dtypes)
        if len(found) != 1:
            raise HubError(
                f"the files hold {sorted(map(str, found))}; name the dtype to load them "
                "in with dtype="
            )
        (dtype,) = found
    options: dict[str, Any] = {"group": group, "seed": None, "dtype": dtype}
    if architecture.sequence_parallel:
        options["sequence_parallel"] = sequence_parallel
    elif sequence_parallel:
        raise ValueError(
            f"sequence_parallel is True, but {architecture.classes[0]} has no tokens between its "
            "layers that ranks share; leave it out"
        )
    try:
        # On the meta device it takes no memory: the files may be of another size.
        described = architecture.model(config, **options, device="meta")
    except (RuntimeError, OverflowError) as error:
        raise HubError(f"config.json describes tensors that no memory holds: {error}") from None
    computed = architecture.computed(config)
    _check_names(architecture, architecture.entries(described), weights, computed)
    _check_computed(architecture, computed, weights)
    model = architecture.model(config, **options, device=device)
    entries = architecture.entries(model)
    names = _check_names(architecture, entries, weights, computed)
    with torch.no_grad():
        for entry in entries:
            _fill(entry, names, weights)
    _check_copies(architecture, entries, names, weights)
    return model.eval()


def _configuration(
    architecture: Architecture,
    values: Mapping[str, Any],
    weights: Weights,
    changes: Mapping[str, Any],
) -> Any:
    known = {field.name for field in fields(architecture.config)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise ValueError(
            f"{architecture.config.__name__} has no {unknown}; it has {', '.join(sorted(known))}"
        )
    if values.get("quantization_config") is not None:
        raise HubError(
            "config.json has quantization_config = "
            f"{str(values['quantization_config'])[:80]}; pyops reads weights that are not "
            "quantized: choose another checkpoint"
        )
    config_fields = ConfigFields(
        values, numbers=sum(map(prod, weights.shapes.values())), tensors=len(weights.shapes)
    )
    try:
        found = architecture.read(config_fields, frozenset(weights.shapes))
        found = with_pattern(found, config_fields)
    except HubError:
        raise
    except ValueError as error:  # of sizes that don't go together, by our names
        raise HubError(f"config.json of {architecture.kind} makes no model: {error}") from None
    return replace(found, **changes)


def _check_names(
    architecture: Architecture, entries: list[Entry], weights: Weights, computed: Collection[str]
) -> dict[str, str]:
    """How the files call each tensor; HubError when they lack some, have others, or have them in
    other shapes."""
    names = frozenset(weights.shapes)
    sources = [source for entry in entries for source in entry.sources]
    called = {source.name: architecture.in_file(source.name, names) for source in sources}
    missing = [name for name in called if called[name] not in names]
    spare = {*architecture.copies, *architecture.copies.values(), *computed}
    known = set(called.values()) | {architecture.in_file(name, names) for name in spare}
    ignored = re.compile("|".join(architecture.ignored) or r"(?!)")
    surplus = [name for name in sorted(names - known) if not ignored.search(name)]
    if missing or surplus:
        what = " and ".join(
            f"{verb} {len(found)} tensors "
            f"({', '.join(found[:NAMED])}{', ...' if len(found) > NAMED else ''})"
            for verb, found in (("lack", missing), ("have besides", surplus))
            if found
        )
        raise HubError(
            f"the files {what} of {architecture.classes[0]} as config.json describes it; "
            "choose the model they are of"
        )
    for source in sources:
        if weights.shapes[called[source.name]] != source.shape:
            raise HubError(
                f"{called[source.name]} is {list(weights.shapes[called[source.name]])} "
                "in the files, but "
                f"{list(source.shape)} by config.json; one of them is of another model"
            )
        if (dtype := weights.dtypes[called[source.name]]) not in FLOATING:
            raise HubError(
                f"{called[source.name]} is of {dtype} in the files; pyops reads "
                f"{', '.join(FLOATING)}: convert it"
            )
    return called


def _fill(entry: Entry, names: Mapping[str, str], weights: Weights) -> None:
    place = entry.placement
    own: Box = ((0,) * entry.parameter.dim(), tuple(entry.parameter.shape))
    part = entry.parameter
    if place is not None:
        own, part = (place.offset, place.size), place.part(entry.parameter)
        if part.numel() < entry.parameter.numel():
            entry.parameter.zero_()
    for source in entry.sources:
        for piece in source.pieces:
            if (inner := meeting(own, piece.at)) is not None:
                where = tuple(
                    slice(low - o, low - o + n)
                    for low, o, n in zip(inner[0], own[0], inner[1], strict=True)
                )
                part[where].copy_(_read(source, piece, inner, names[source.name], weights))


def _read(source: Source, piece: Piece, inner: Box, name: str, weights: Weights) -> Tensor:
    """Box `inner` of our whole parameter, which lies within the piece."""
    offset = [
        o + low - start for o, low, start in zip(piece.offset, inner[0], piece.at[0], strict=True)
    ]
    size = list(inner[1])
    if source.transposed:
        offset, size = offset[::-1], size[::-1]
    # Dims of size 1 in front, on one side or the other.
    surplus = len(size) - (len(source.shape) - source.trailing)
    offset = offset[surplus:] if surplus >= 0 else [0] * -surplus + offset
    size = size[surplus:] if surplus >= 0 else [1] * -surplus + size
    offset, size = offset + [0] * source.trailing, size + [1] * source.trailing
    found = weights.read(name, (tuple(offset), tuple(size)))
    return (found.T if source.transposed else found).reshape(inner[1])


def _check_computed(
    architecture: Architecture, computed: Mapping[str, Tensor], weights: Weights
) -> None:
    """HubError where the files hold something else than what we compute, which transformers would
    take."""
    held = frozenset(weights.shapes)
    for name, ours in computed.items():
        if (spelled := architecture.in_file(name, held)) not in held:
            continue
        same = weights.shapes[spelled] == ours.shape and weights.dtypes[spelled] in FLOATING
        if same:
            read = weights.read(spelled, ((0,) * ours.dim(), tuple(ours.shape)))
            rounding = 4 * max(torch.finfo(read.dtype).eps, torch.finfo(ours.dtype).eps)
            same = bool(((read.to(ours.dtype) - ours).abs() <= rounding).all())
        if not same:
            raise HubError(
                f"{spelled} differs from what pyops computes in its place "
                f"({list(ours.shape)}, fixed by config.json); the "
                "model was changed after it was made: choose another checkpoint"
            )


def _check_copies(
    architecture: Architecture, entries: list[Entry], names: Mapping[str, str], weights: Weights
) -> None:
    """HubError where a tensor that should be another one's copy is not. Only this rank's part is
    compared."""
    held = frozenset(weights.shapes)
    for copy, original in architecture.copies.items():
        spelled = architecture.in_file(copy, held)
        if spelled not in held or copy in names or original not in names:
            continue
        entry = next(e for e in entries if any(source.name == original for source in e.sources))
        if weights.shapes[spelled] != entry.shape:
            raise HubError(
                f"{spelled} is {list(weights.shapes[spelled])}, and {names[original]}, "
                "whose copy it should be, "
                f"{list(entry.shape)}; one of them is of another model"
            )
        place = entry.placement
        own: Box = (
            ((0,) * entry.parameter.dim(), entry.shape)
            if place is None
            else (place.offset, place.size)
        )
        part = entry.parameter if place is None else place.part(entry.parameter)
        if not torch.equal(weights.read(spelled, own).to(part), part):
            raise HubError(
                f"{spelled} differs from {names[original]}, but config.json ties them; "
                "set tie_word_embeddings "
                "to false there, or leave one of them out of the files"
            )
