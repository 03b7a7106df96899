"""Which channels of a model's layers may change places: those within layers, as these say, and
those of the residual stream, which all layers of a transformer read and write.

    stream    columns of what reads it: q, k, v, up, gate
              rows and biases of what writes it: output, down; norms; columns of embedding tables
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from pyops.flat import ChannelPart, ChannelSet
from pyops.tensor_parallel.layers.embedding import VocabParallelEmbedding
from pyops.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from pyops.tensor_parallel.layers.norm import LayerNorm, RMSNorm

__all__ = ["inner_channels", "stream", "stream_parts"]

TURNED = (
    "rotary positions turn pairs of channels of queries and keys, each pair by a frequency of its "
    "own; permute other channels, such as *.values.*"
)


def inner_channels(model: nn.Module, *, rotary: bool = False) -> Iterator[ChannelSet]:
    """What the layers of a model say of the channels within them, by the model's names.

    Args:
        model: Whose modules are asked for `channels()`.
        rotary: Whether positions turn queries and keys, whose channels then stay where they are.
    """
    for name, module in model.named_modules():
        channels = getattr(module, "channels", None)
        if name and callable(channels):
            for found in channels():
                turned = rotary and found.name.startswith("scores.")
                yield (replace(found, fixed=TURNED) if turned else found).under(name)


def stream(model: nn.Module, size: int, others: Iterable[ChannelPart] = ()) -> ChannelSet:
    """The residual stream of a transformer.

    Args:
        model: With an embedding, blocks and a head.
        size: Its width.
        others: Where it lies beside the layers of tensor parallelism.

    Raises:
        ValueError: For a part of a model, such as a pipeline's stage.
    """
    blocks, config = getattr(model, "blocks", None), getattr(model, "config", None)
    some = isinstance(blocks, nn.ModuleList) and len(blocks) < getattr(config, "num_layers", 0)
    if some or not hasattr(model, "embedding") or not hasattr(model, "head"):
        raise ValueError(
            f"this {type(model).__name__} is a part of a model, whose residual stream goes on in "
            "others; permute the whole model before a pipeline takes it apart"
        )
    return ChannelSet("residual", size, (*stream_parts(model), *others))


def stream_parts(model: nn.Module) -> Iterator[ChannelPart]:
    """Where the residual stream lies in the layers of tensor parallelism, all of which read or
    write it; a vocabulary head among them, whose matrix is not counted as one to prune.

    Args:
        model: A transformer.
    """
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, ColumnParallelLinear):
            last = module.weight.dim() - 1
            head = name.startswith("head.")
            yield ChannelPart(f"{name}.weight", last, reads=not head)
        elif isinstance(module, VocabParallelEmbedding):
            yield ChannelPart(f"{name}.weight", 1)
        elif isinstance(module, RowParallelLinear | LayerNorm | RMSNorm):
            yield from (ChannelPart(f"{name}.{key}") for key in own if key in ("weight", "bias"))
