"""Longer rows for a model with learned positions: of its table of L rows one of L' is interpolated.

    place in the new table     0    1    2    3    4    5    6          L' = 7
    place in the old one       0   0.5   1   1.5   2   2.5   3          L = 4: i (L - 1) / (L' - 1)

The first and the last row stay, and so does their order, so a model goes on from what it has learnt
instead of from rows that begin anew or are repeated.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["interpolate_positions"]

TABLES = ("wpe", "position_embeddings", "embed_positions", "position")
COUNTERS = ("position_ids", "token_type_ids")  # buffers with a number for each place
FIELDS = ("max_position_embeddings", "sequence_length")  # of a configuration


@dataclass(frozen=True)
class _Table:
    """A table of positions, and how many of its first rows are none."""

    name: str
    module: nn.Module
    weight: Tensor
    special: int

    @property
    def length(self) -> int:
        return int(self.weight.shape[0]) - self.special


def interpolate_positions(model: nn.Module, length: int) -> None:
    """Give a model with learned positions a longer table of them, interpolated from its own.

    Tables, the buffers that count places, and the configurations are changed in place; parameters
    are new objects, so call it before an optimizer or a strategy takes them. Ranks that hold the
    same model get the same table.

    Args:
        model: Of transformers (BERT, GPT-2, OPT, BART, RoBERTa and others whose table is an
            embedding), or of `pyops.models` with positions = "learned".
        length: Tokens of a row from now on.

    Raises:
        ValueError: When the model has no such table, `length` is shorter than it is, or a buffer of
            the old length is of an unknown kind; nothing is changed then.
    """
    tables = _tables(model)
    if not tables:
        raise ValueError(
            f"{type(model).__name__} has no table of learned positions (an embedding named "
            f"{', '.join(TABLES)}); rotary positions are stretched in the configuration: "
            "rope_parameters of transformers, rotary_stretch of pyops.models"
        )
    lengths = {table.length for table in tables}
    if len(lengths) > 1:
        found = ", ".join(f"{table.name} {table.length}" for table in tables)
        raise ValueError(f"the tables of positions have several lengths: {found}; give one model")
    old = lengths.pop()
    if length < old:
        raise ValueError(
            f"length is {length}, but the model has {old} positions; give more, a shorter row "
            "needs no change"
        )
    # Tables with rows that are no positions are counted by some configurations with them.
    lengths = {old, old + tables[0].special}
    counters, configurations = _counters(model, lengths), _configurations(model, lengths)
    for table in tables:
        _replace(table, length)
    for module, name, buffer in counters:
        _lengthen(module, name, buffer, length - old)
    for module, field, value in configurations:
        try:
            setattr(module.config, field, value + length - old)
        except dataclasses.FrozenInstanceError:
            module.config = dataclasses.replace(module.config, **{field: value + length - old})


def _tables(model: nn.Module) -> list[_Table]:
    found = []
    for name, module in model.named_modules(remove_duplicate=True):
        weight = getattr(module, "weight", None)
        if name.rpartition(".")[2] not in TABLES or not isinstance(weight, nn.Parameter):
            continue
        if isinstance(module, nn.Embedding):
            padding = -1 if module.padding_idx is None else module.padding_idx
            special = int(getattr(module, "offset", padding + 1))
        elif hasattr(module, "placements"):
            special = 0
        else:
            continue
        found.append(_Table(name, module, weight, special))
    return found


def _counters(model: nn.Module, lengths: set[int]) -> list[tuple[nn.Module, str, Tensor]]:
    """The buffers that count places; ValueError for others that are as long."""
    found = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not lengths & set(buffer.shape):
                continue
            if name not in COUNTERS or buffer.shape[-1] not in lengths:
                raise ValueError(
                    f"the buffer {prefix}.{name} of shape {list(buffer.shape)} has the length of "
                    "the positions, and what a longer one holds is not known; make the model anew "
                    "with the longer configuration, and give it the weights"
                )
            found.append((module, name, buffer))
    return found


def _configurations(model: nn.Module, lengths: set[int]) -> list[tuple[Any, str, int]]:
    """(module with a configuration, the field with the length, its value)."""
    found = []
    for module in model.modules():
        for field in FIELDS:
            value = getattr(getattr(module, "config", None), field, None)
            if value in lengths:
                found.append((module, field, value))
    return found


def _interpolated(table: Tensor, length: int) -> Tensor:
    """[L, D] -> [length, D], corners onto corners, in the table's dtype."""
    old = table.shape[0]
    steps = max(1, length - 1)
    # Whole numbers: a place that falls on a row of the old table is that row exactly.
    scaled = torch.arange(length, device=table.device) * (old - 1)
    below = scaled // steps
    part = (scaled % steps).double().unsqueeze(1) / steps
    rows = table.double()
    above = (below + 1).clamp(max=old - 1)
    return (rows[below] * (1.0 - part) + rows[above] * part).to(table.dtype)


@torch.no_grad()
def _replace(table: _Table, length: int) -> None:
    module, old = table.module, table.weight
    rows = torch.cat([old[: table.special], _interpolated(old[table.special :], length)])
    module.weight = nn.Parameter(rows, requires_grad=old.requires_grad)
    if isinstance(module, nn.Embedding):
        module.num_embeddings = len(rows)
    placements: Any = getattr(module, "placements", None)
    if placements is not None:
        shape = tuple(rows.shape)
        placements["weight"] = dataclasses.replace(placements["weight"], global_shape=shape)


def _lengthen(module: nn.Module, name: str, buffer: Tensor, added: int) -> None:
    """Further places: the next numbers, or further zeros."""
    tail = torch.zeros(*buffer.shape[:-1], added, dtype=buffer.dtype, device=buffer.device)
    if name == "position_ids":
        size = buffer.shape[-1]
        tail += torch.arange(size, size + added, dtype=buffer.dtype, device=buffer.device)
    setattr(module, name, torch.cat([buffer, tail], dim=-1))
