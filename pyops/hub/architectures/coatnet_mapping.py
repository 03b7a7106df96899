"""CoAtNet as timm has it: `coatnet_0_224` and its like, and the variants `_rw` that were trained.

    stages.1.blocks.0.conv1_1x1.weight [4 C, C, 1, 1]    ->    blocks.2.expand.weight [4 C, C]
    stages.1.blocks.0.norm1.running_mean                 ->    blocks.2.norm1.norm.running_mean

Not read: variants whose biases come from a small network (`rmlp`), or whose transformer blocks have
batch norms (`bn`), and those with other blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pyops.hub.architectures.architecture import Architecture
from pyops.hub.config_fields import ConfigFields
from pyops.hub.folder_files import HubError
from pyops.hub.weight_packing import AttentionShape, Packing, Same
from pyops.models import CoAtNet, CoAtNetConfig

__all__ = ["COATNET", "timm_names"]

NAMED = re.compile(r"coatnet_(?P<variant>[0-5]|(?:pico|nano|[0-3])_rw)_(?P<side>\d+)")
STATISTICS = ("running_mean", "running_var")
AFFINE = ("weight", "bias")
CONVOLUTION = {
    "expand": ("conv1_1x1", 2),
    "depthwise": ("conv2_kxk", 0),
    "project": ("conv3_1x1", 2),
    "shortcut": ("shortcut.expand", 2),
}
TRANSFORMER = {
    "attention.qkv": ("attn.qkv", 2),
    "attention.output": ("attn.proj", 2),
    "mlp.up": ("mlp.fc1", 2),
    "mlp.down": ("mlp.fc2", 2),
    "shortcut": ("shortcut.expand", 2),
}


def timm_names(config: CoAtNetConfig) -> dict[str, Same]:
    """Our names of parameters and running statistics, to timm's tensors."""
    found = dict(_stem(config))
    places: dict[int, int] = {}
    for i, block in enumerate(config.blocks()):
        number = places.setdefault(block.stage, 0)
        places[block.stage] += 1
        theirs = f"stages.{block.stage - 1}.blocks.{number}."
        pairs = _convolution(config) if block.kind == "C" else _transformer(block.stride)
        found |= {f"blocks.{i}.{ours}": _renamed(same, theirs) for ours, same in pairs}
    found |= dict(_head(config))
    return found


def _renamed(same: Same, prefix: str) -> Same:
    return Same(prefix + same.name, trailing=same.trailing)


def _norm(config: CoAtNetConfig, ours: str, theirs: str) -> Iterator[tuple[str, Same]]:
    for key in (*AFFINE, *(() if config.norm == "layer" else STATISTICS)):
        yield f"{ours}.norm.{key}", Same(f"{theirs}.{key}")


def _linear(ours: str, theirs: str, trailing: int) -> Iterator[tuple[str, Same]]:
    yield f"{ours}.weight", Same(f"{theirs}.weight", trailing=trailing)
    yield f"{ours}.bias", Same(f"{theirs}.bias")


def _stem(config: CoAtNetConfig) -> Iterator[tuple[str, Same]]:
    for name in ("conv1", "conv2"):
        yield f"stem.{name}.weight", Same(f"stem.{name}.weight")
    yield from _norm(config, "stem.norm", "stem.norm1")


def _convolution(config: CoAtNetConfig) -> Iterator[tuple[str, Same]]:
    for name in ("pre_norm", "norm1", "norm2"):
        yield from _norm(config, name, name)
    for ours, (theirs, trailing) in CONVOLUTION.items():
        yield from _linear(ours, theirs, trailing)
    se = "se_early" if config.se_early else "se"
    for ours, theirs in (("squeeze", "fc1"), ("excite", "fc2")):
        yield from _linear(f"se.{ours}", f"{se}.{theirs}", 2)


def _transformer(stride: int) -> Iterator[tuple[str, Same]]:
    yield from _linear("norm1", "norm1.norm" if stride > 1 else "norm1", 0)
    yield from _linear("norm2", "norm2", 0)
    for ours, (theirs, trailing) in TRANSFORMER.items():
        yield from _linear(ours, theirs, trailing)
    yield "attention.bias.table", Same("attn.rel_pos.relative_position_bias_table")
    yield "scale1", Same("ls1.gamma")
    yield "scale2", Same("ls2.gamma")


def _head(config: CoAtNetConfig) -> Iterator[tuple[str, Same]]:
    yield from _linear("head.norm", "head.norm" if config.head_hidden else "norm", 0)
    yield from _linear("head.hidden", "head.pre_logits.fc", 0)
    yield from _linear("head.output", "head.fc", 0)


def read(fields: ConfigFields, names: frozenset[str]) -> CoAtNetConfig:
    found = NAMED.fullmatch(str(fields.raw("architecture")))
    if found is None:
        raise HubError(
            f"config.json is of architecture {fields.raw('architecture')!r}, which is not known; "
            "of timm's CoAtNets pyops has coatnet_0_224 to coatnet_5_224, and pico, nano, 0, 1, 2 "
            "and 3 of coatnet_*_rw"
        )
    if fields.section("model_args"):
        fields.fixed(model_args={})
    described = fields.section("pretrained_cfg") or {}
    size = described.get("input_size", [3, int(found["side"]), int(found["side"])])
    if not isinstance(size, list) or len(size) != 3 or any(type(n) is not int for n in size):
        raise HubError(
            f"config.json has pretrained_cfg.input_size = {str(size)[:80]}; it must be a list of "
            "channels, height and width, such as [3, 224, 224]"
        )
    if fields.raw("global_pool", "avg") != "avg":
        fields.fixed(global_pool="avg")
    changes: dict[str, Any] = {"head_dim": 32} if found["variant"] == "5" else {}
    return CoAtNetConfig.named(
        found["variant"],
        num_labels=fields.integer("num_classes", 1000),
        num_channels=size[0],
        image_size=size[1],
        image_width=0 if size[1] == size[2] else size[2],
        **changes,
    )


def write(config: CoAtNetConfig) -> dict[str, Any]:
    raise HubError("a CoAtNet is read from timm's files, and not written to them")


def names_of(config: CoAtNetConfig) -> Mapping[str, Packing]:
    return timm_names(config)


COATNET = Architecture(
    kind="timm",
    classes=("a CoAtNet of timm",),
    model=CoAtNet,
    config=CoAtNetConfig,
    names=names_of,
    read=read,
    write=write,
    heads=lambda config: AttentionShape(1, 1, config.head_dim),
    ignored=(r"\.num_batches_tracked$", r"\.relative_position_index$"),
    buffers=STATISTICS,
    sequence_parallel=False,
)
