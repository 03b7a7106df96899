"""What is known of an architecture: its config.json, and where the tensors of its files go.

    config.json  --read-->  GPTConfig  --write-->  config.json
    "blocks.{i}.attention.qkv.weight":
        Grouped("h.{i}.attn.c_attn.weight", joined=True, transposed=True)

Each file of this room beside it describes one architecture, as data: names, packings, and the
fields of config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from pyops.flat import Placement
from pyops.hub.config_fields import ConfigFields
from pyops.hub.weight_packing import AttentionShape, Packing, Source

__all__ = ["Architecture", "Entry"]


@dataclass(frozen=True)
class Architecture:
    """One architecture of Hugging Face, and the model of ours that computes it.

    Attributes:
        kind: model_type of config.json.
        classes: What "architectures" may say there; the first unless `write` says otherwise.
        names: Of a configuration, our parameters' names to packings, with {i} for a layer's number.
        read: config.json, and the names in the files, to our configuration, HubError for what we
            lack.
        write: The other way round.
        heads: Of an attention.
        prefix: That of the names, which a file may lack.
        copies: Tensors that a file may hold besides, equal to another one.
        ignored: Patterns of names that are no parameters.
        renamed: (new, old) parts of names.
        computed: Of a configuration, tensors that the files may hold and that we compute: what they
            hold must be that.
        buffers: Last parts of the names of buffers that the files hold, too; each lies on its ranks
            as the `weight` beside it.
        sequence_parallel: Whether the model takes it.
    """

    kind: str
    classes: tuple[str, ...]
    model: Callable[..., nn.Module]
    config: type
    names: Callable[[Any], Mapping[str, Packing]]
    read: Callable[[ConfigFields, frozenset[str]], Any]
    write: Callable[[Any], dict[str, Any]]
    heads: Callable[[Any], AttentionShape]
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    computed: Callable[[Any], Mapping[str, Tensor]] = lambda config: {}
    buffers: tuple[str, ...] = ()
    sequence_parallel: bool = True

    def entries(self, model: nn.Module) -> list[Entry]:
        """Every parameter of the model with what it is made of, in the model's order, a shared one
        once; and the buffers that the files hold."""
        placements, heads, names = (
            Placement.of(model),
            self.heads(model.config),
            self.names(model.config),
        )
        found = []
        for name, parameter in (*model.named_parameters(), *self._held_buffers(model)):
            prefix, _, last = name.rpartition(".")
            beside = f"{prefix}.weight" if last in self.buffers else name
            placement = placements.get(beside)
            shape = tuple(parameter.shape) if placement is None else placement.global_shape
            number = re.search(r"\.(\d+)\.", name)
            packing = names.get(name) or names[re.sub(r"\.\d+\.", ".{i}.", name, count=1)]
            sources = packing.sources(shape, heads)
            if number:
                sources = [replace(s, name=s.name.replace("{i}", number[1])) for s in sources]
            found.append(Entry(name, parameter, placement, tuple(sources)))
        return found

    def _held_buffers(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        return [
            (name, buffer)
            for name, buffer in model.named_buffers()
            if name.rpartition(".")[2] in self.buffers
        ]

    def in_file(self, name: str, names: frozenset[str]) -> str:
        """How a file with these names calls the tensor `name`."""
        spellings = [name, name.removeprefix(self.prefix)]
        for new, old in self.renamed:
            spellings += [spelling.replace(new, old) for spelling in spellings]
        return next((spelling for spelling in spellings if spelling in names), name)


@dataclass(frozen=True)
class Entry:
    """A parameter of ours: the rank's tensor, its place in the whole (None: it is all of it), and
    what the whole is made of."""

    name: str
    parameter: Tensor
    placement: Placement | None
    sources: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return (
            tuple(self.parameter.shape) if self.placement is None else self.placement.global_shape
        )
