"""Adapters as files of peft: adapter_config.json and adapter_model.safetensors.

    a layer of ours                        the file
    blocks.0.attention.qkv.adapter.A       ...q_proj.lora_A.weight = ...k_proj... = ...v_proj...
    blocks.0.attention.qkv.adapter.B       ...q_proj.lora_B.weight | ...k_proj... | ...v_proj...

What a layer of ours is made of, is asked of `pyops.hub`; layers of models that it does not know,
and those of models of others, have their own names. A file whose A differ within one of our layers
is read as an adapter of as many times the rank, which computes the same; it is written with
rank_pattern and alpha_pattern.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pyops.adapters.fingerprint import fingerprint
from pyops.adapters.lora import LoRA, attach, linear_layers, sizes
from pyops.checkpoint.writing import write_folder
from pyops.comm.agreement import on_first_rank, ranks_agree
from pyops.flat import Placement
from pyops.given_numbers import check_number, check_whole
from pyops.hub import HubError
from pyops.hub.architectures.registry import architecture_of
from pyops.hub.part_gathering import gather_parts
from pyops.hub.weight_packing import Grouped, Packing, Same, Source, Transposed, pack, unpack
from pyops.mesh import ALONE
from pyops.ops.memory import require_memory
from pyops.tensor_parallel import LowRank, Ranks, RanksLike

__all__ = ["load", "save"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE = "pyops_base"  # in the metadata of the weights
UNKNOWN = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "modules_to_save",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
)
"""What peft's adapters may have besides, by its name in the config."""


@dataclass(frozen=True)
class _Layer:
    """A layer of the model, and what its weight is made of in the files."""

    name: str
    module: nn.Module
    sources: tuple[Source, ...]
    """Of its B, whose names are those of layers."""


def _layers(model: nn.Module) -> dict[str, _Layer]:
    """Of every linear layer."""
    try:
        architecture = architecture_of(model)
    except HubError:
        architecture = None
    found = {}
    for name, module in linear_layers(model).items():
        packing: Packing = Same(f"{name}.weight")
        heads = None
        number = next((part for part in name.split(".") if part.isdigit()), None)
        if architecture is not None:
            heads = architecture.heads(model.config)
            known = architecture.names(model.config)
            general = ".".join("{i}" if part == number else part for part in name.split("."))
            packing = _upright(known.get(f"{general}.weight", packing))
        shape = (*_lead(module), sizes(module)[1], 1)
        sources = packing.sources(shape, heads)
        found[name] = _Layer(
            name,
            module,
            tuple(
                replace(s, name=s.name.replace("{i}", number or "").removesuffix(".weight"))
                for s in sources
            ),
        )
    return found


def _lead(module: Any) -> tuple[int, ...]:
    stacked = getattr(module, "stacked", 0)
    return (stacked,) if stacked else ()


def _upright(packing: Packing) -> Packing:
    """As B lies in the file, which is [out, r] whatever the weight is."""
    if isinstance(packing, Transposed):
        return Same(packing.name)
    if isinstance(packing, Grouped):
        return Grouped(*packing.names, joined=packing.joined)
    return packing


def _of_rank(source: Source, rank: int) -> Source:
    """A source of B with one column as one with r."""
    pieces = tuple(
        replace(piece, at=(piece.at[0], (*piece.at[1][:-1], rank))) for piece in source.pieces
    )
    return replace(source, shape=(*source.shape[:-1], rank), pieces=pieces)


@torch.no_grad()
def save(
    lora: LoRA, folder: Path | str, *, group: RanksLike = None, base: Path | str | None = None
) -> None:
    """Write the adapters as peft does. A collective of the ranks that share the model; rank 0
    writes.

    Args:
        lora: The adapters. Where they were merged meanwhile, which rounds the base, the file does
            not say of which base they are.
        folder: Written beside its place and renamed; an earlier save there is replaced.
        group: The ranks that share the model's layers; None: those that a model of pyops was made
            with, or this process.
        base: The folder, or the hub's name, of the base, for peft.

    Raises:
        ValueError: On every rank, for a folder that holds something else or can't be written, and
            adapters that were taken off, have no memory, or are not finite. What was there before
            stays.
        TypeError: For what is no LoRA.
        RuntimeError: For parameters that ZeRO stage 3 has shared out: save within
            optimizer.whole_parameters().
    """
    if not isinstance(lora, LoRA):
        raise TypeError(f"adapters.save: lora is a {type(lora).__name__}; give the LoRA of a model")
    base = None if base is None else os.fspath(base)
    ranks = _ranks(lora.model, group)
    folder = Path(folder)
    layers = _layers(lora.model)
    with ranks_agree(ranks.group):
        _check_save(lora, folder)
        for name, parameter in lora.model.named_parameters():
            require_memory(parameter, name)
        lora.check_finite("adapters.save")
    mark = {} if lora.was_merged else {BASE: fingerprint(lora.model, group=ranks)}
    tensors: dict[str, Tensor] = {}
    modules: dict[str, int] = {}  # the rank of each
    for name, adapter in lora.adapters.items():
        places = getattr(adapter, "placements", {})
        A, B = (
            gather_parts(adapter.get_parameter(key).detach(), places.get(key), ranks)
            for key in "AB"
        )
        for source in layers[name].sources:
            modules[source.name] = adapter.rank
            if A is None or B is None:
                continue
            tensors[f"{PREFIX}{source.name}.lora_A.weight"] = A.cpu().clone()
            part = unpack(B, _of_rank(source, adapter.rank))
            tensors[f"{PREFIX}{source.name}.lora_B.weight"] = part.cpu().contiguous()
    config = _config(lora, modules, base)

    def fill(aside: Path) -> None:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt", **mark})
        (aside / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    on_first_rank(lambda: write_folder(folder, fill, who="adapters.save"), group=ranks.group)


def _ranks(model: nn.Module, group: RanksLike) -> Ranks:
    found = getattr(getattr(model, "layout", None), "ranks", None)
    if group is None and isinstance(found, Ranks):
        return found
    return Ranks.of(ALONE if group is None else group)


def _check_save(lora: LoRA, folder: Path) -> None:
    if not lora.layers:
        raise ValueError("adapters.save: the adapters were taken off the model; save them before")
    if folder.exists():
        there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [folder.name]
        foreign = [name for name in there if name not in (CONFIG, WEIGHTS)]
        if foreign:
            raise ValueError(
                f"adapters.save: {folder} is there already and holds {', '.join(foreign[:3])}; a "
                "save replaces what it wrote and nothing else: name another place"
            )


def _config(lora: LoRA, modules: Mapping[str, int], base: str | None) -> dict[str, Any]:
    others = {name: rank for name, rank in modules.items() if rank != lora.rank}
    causal = hasattr(lora.model, "head") or hasattr(lora.model, "lm_head")
    conv = any(type(layer).__name__ == "Conv1D" for layer in lora.layers.values())
    gpt2 = any(".attn.c_attn" in name for name in modules)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if causal else None,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": conv or gpt2,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": others,
        "alpha_pattern": {name: lora.alpha / lora.rank * rank for name, rank in others.items()},
        "use_rslora": False,
        "use_dora": False,
    }


def load(model: nn.Module, folder: Path | str, *, group: RanksLike = None) -> LoRA:
    """Give a model the adapters of a folder that `save` or peft wrote. A collective of the ranks
    that share the model.

    Args:
        model: The base; of pyops, or of transformers for adapters of it.
        folder: With adapter_config.json and adapter_model.safetensors.
        group: As of `save`.

    Raises:
        ValueError: On every rank, for files that are missing or damaged, adapters of another kind,
            of layers that the model does not have, of other shapes, or of another base (as `save`
            noted it; peft does not). The model is then what it was.
    """
    ranks, folder = _ranks(model, group), Path(folder)
    with ranks_agree(ranks.group):
        config, tensors, mark = _read(folder)
    if mark is not None:
        own = fingerprint(model, group=ranks)
        if own != mark:
            raise ValueError(
                f"{folder} has adapters of a base with the fingerprint {mark}, but that of the "
                f"model is {own}: load the base that they were trained on, without changes"
            )
    with ranks_agree(ranks.group):
        factors = _factors(model, folder, tensors, config)
        scale = config["lora_alpha"] / config["r"]
        attach(model, {name: len(A) for name, (A, _) in factors.items()}, scale=scale)
        lora = LoRA.of(
            model,
            alpha=config["lora_alpha"],
            rank=config["r"],
            dropout=float(config["lora_dropout"]),
        )
        for name, adapter in lora.adapters.items():
            _fill(adapter, *factors[name])
    return lora


@torch.no_grad()
def _fill(adapter: LowRank, A: Tensor, B: Tensor) -> None:
    places = getattr(adapter, "placements", {})
    for key, whole in (("A", A), ("B", B)):
        place: Placement | None = places.get(key)
        adapter.get_parameter(key).copy_(whole if place is None else place.take(whole))


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], str | None]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} does not exist; name a folder that peft wrote")
    try:
        config = json.loads((folder / CONFIG).read_text())
        with safe_open(folder / WEIGHTS, "pt") as opened:
            names = list(opened.keys())
            tensors = {name: opened.get_tensor(name) for name in names}
            mark = (opened.metadata() or {}).get(BASE)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ValueError(
            f"the adapters of {folder} are damaged ({error}); save them anew"
        ) from None
    _check_config(folder, config)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
            raise ValueError(
                f"{folder} has numbers of {name}, {tensor.dtype}, that are not finite; train the "
                "adapters anew, or take those of an earlier step"
            )
    return config, tensors, mark


def _check_config(folder: Path, config: Any) -> None:
    """Refuse what `LoRA` has not, and numbers without sense."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise ValueError(f"{folder} has adapters of peft_type {kind!r}; pyops reads LORA")
    for name in UNKNOWN:
        if config.get(name):
            raise ValueError(f"{folder / CONFIG} has {name} = {config[name]!r}; pyops has none")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{folder / CONFIG} has bias = {config['bias']!r}; pyops has none")
    where = f"{folder / CONFIG}: "
    check_whole(f"{where}r", config.get("r"), least=1)
    _check_alpha(f"{where}lora_alpha", config.get("lora_alpha"))
    check_number(
        f"{where}lora_dropout",
        config.setdefault("lora_dropout", 0.0),
        lambda v: 0 <= v < 1,
        "give a share from 0 to below 1",
    )
    for key, check in (("rank_pattern", check_whole), ("alpha_pattern", _check_alpha)):
        if not isinstance(patterns := config.get(key) or {}, dict):
            raise ValueError(f"{where}{key} is {patterns!r}; give an object")
        for name, value in patterns.items():
            check(f"{where}{key} of {name}", value, least=1)


def _check_alpha(name: str, value: object, **_: int) -> None:
    check_number(name, value, lambda v: 0 < v < math.inf, "give a number above 0")


def _factors(
    model: nn.Module, folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]
) -> dict[str, tuple[Tensor, Tensor]]:
    """{name of a layer: (A, B)}, whole."""
    left, found = set(tensors), {}
    for name, layer in _layers(model).items():
        given = []
        for source in layer.sources:
            keys = [f"{PREFIX}{source.name}.lora_{key}.weight" for key in "AB"]
            if not all(key in tensors for key in keys):
                continue
            left -= set(keys)
            A, B = (tensors[key] for key in keys)
            own = A.shape[0] if A.dim() else 0
            shapes = (own, sizes(layer.module)[0]), (*source.shape[:-1], own)
            if (A.shape, B.shape) != shapes:
                raise ValueError(
                    f"{folder} has A {list(A.shape)} and B {list(B.shape)} of {source.name}, which "
                    f"is [{prod(source.shape)}, {sizes(layer.module)[0]}]; load its own base"
                )
            given.append((source, A, B * _factor(folder, config, source.name, own)))
        if given:
            found[name] = _joined(layer, given)
    if left or not found:
        raise ValueError(
            f"{folder} has {sorted(left)[:2]}, and {type(model).__name__} no such layer; load the "
            "base that they were trained on"
        )
    return found


def _factor(folder: Path, config: dict[str, Any], name: str, rows: int) -> float:
    """By what the alpha / r of a layer is larger than that of the whole, which patterns change."""
    rank, alpha = (
        _of_layer(config.get(f"{key}_pattern"), name, config[whole])
        for key, whole in (("rank", "r"), ("alpha", "lora_alpha"))
    )
    if rows != rank and (config.get("rank_pattern") or not rows or rows % rank):
        raise ValueError(
            f"{folder / CONFIG} has r = {rank} of {name}, whose A has {rows} rows: one of the two "
            "files is another's; save the adapters anew"
        )
    return float(alpha / rank / (config["lora_alpha"] / config["r"]))


def _of_layer(patterns: Mapping[str, Any] | None, name: str, otherwise: Any) -> Any:
    """The value of the first pattern that ends a layer's name, as peft looks it up."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return otherwise


def _joined(layer: _Layer, given: list[tuple[Source, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One A and one B of the parts of a layer."""
    first = given[0][1]
    same = all(torch.equal(A, first) for _, A, _ in given)
    rank = len(first) if same else sum(len(A) for _, A, _ in given)
    B = first.new_zeros(*_lead(layer.module), sizes(layer.module)[1], rank)
    at = 0
    for source, A, part in given:
        columns = B[..., at : at + len(A)]
        pack(part, _of_rank(source, len(A)), columns)
        at += 0 if same else len(A)
    return (first if same else torch.cat([A for _, A, _ in given])), B
