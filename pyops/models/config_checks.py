"""What the models' configurations have in common: which activations and positions there are, and
what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pyops.attention import Pattern, pattern_from_text
from pyops.ops.attention.block_tables import check_sizes

__all__ = [
    "ACTIVATIONS",
    "POSITIONS",
    "check_config",
    "check_pattern",
    "check_size",
    "estimated_elements",
    "largest_field",
    "pattern_of",
]

POSITIONS = ("learned", "rotary")
MOST_NUMBERS = 1 << 48  # of a model: a PiB in fp32
NUMBERS_OF_A_LAYER = 5000  # what its Python objects take besides, in numbers of four bytes
SIZES = (
    "vocab_size",
    "sequence_length",
    "num_layers",
    "num_decoder_layers",
    "num_heads",
    "num_kv_heads",
    "dim",
    "head_dim",
    "hidden",
    "num_types",
    "num_labels",
    "image_size",
    "num_channels",
    "num_buckets",
    "patch_size",
)


class Activation(NamedTuple):
    """What an activation of a configuration means to ParallelMLP."""

    function: str
    gated: bool = False


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu": Activation("relu"),
    "swiglu": Activation("silu", gated=True),
    "gated_gelu": Activation("gelu_tanh", gated=True),
}


def check_config(
    config: Any, *, at_least_one: Sequence[str], choices: Mapping[str, Sequence[str]]
) -> None:
    """ValueError naming the field, its value and what would do; of fields that every model has."""
    for field in at_least_one:
        if getattr(config, field) < 1:
            raise ValueError(f"{field} is {getattr(config, field)}; it must be 1 or more")
    check_size(config)
    for field, known in choices.items():
        if getattr(config, field) not in known:
            raise ValueError(
                f"{field} is {getattr(config, field)!r}; choose one of {', '.join(known)}"
            )
    if not getattr(config, "head_dim", 0) and config.dim % config.num_heads:
        raise ValueError(
            f"dim is {config.dim}, which num_heads = {config.num_heads} does not divide; "
            "change one of them"
        )
    for field in ("hidden", "head_dim", "num_kv_heads"):
        if getattr(config, field, 0) < 0:
            raise ValueError(
                f"{field} is {getattr(config, field)}; give a number, or 0 for the usual one"
            )
    for field in ("dropout", "attention_dropout"):
        if not 0.0 <= getattr(config, field) < 1.0:
            raise ValueError(
                f"{field} is {getattr(config, field)}; it is a probability, 0 or more "
                "and less than 1"
            )
    if getattr(config, "positions", None) == "rotary":
        _check_rotary(config)
    if not config.norm_eps > 0.0:
        raise ValueError(f"norm_eps is {config.norm_eps}; it must be more than 0")


def _check_rotary(config: Any) -> None:
    if (width := getattr(config, "head_dim", 0) or config.dim // config.num_heads) % 2:
        of = "head_dim, or " if hasattr(config, "head_dim") else ""
        raise ValueError(
            f"positions is 'rotary', which turns pairs, but a head is {width} wide "
            f"({of}dim {config.dim} / num_heads "
            f"{config.num_heads}); make that even"
        )
    if not config.rotary_theta > 0.0:
        raise ValueError(
            f"rotary_theta is {config.rotary_theta}; it must be more than 0, such as 10000"
        )


def pattern_of(config: Any) -> Pattern | None:
    """The pattern of attention that a configuration names."""
    return pattern_from_text(config.pattern) if config.pattern else None


def check_pattern(config: Any) -> None:
    """ValueError for a pattern that is none, or that sequence_length can't have; its text becomes
    that of `str`, so that equal patterns have equal configurations."""
    if config.pattern:
        pattern = pattern_from_text(str(config.pattern))
        object.__setattr__(config, "pattern", str(pattern))
        pattern.check(-(-config.sequence_length // max(config.pattern_block, 1)))
    try:
        check_sizes(config.pattern_block, 0, 0)
    except ValueError as error:
        raise ValueError(f"pattern_{error}") from None


def estimated_elements(config: Any) -> int:
    """About how many numbers a model has, and what else grows with its fields; never less than its
    weights in fp32. A configuration with other fields says so itself, in `estimated_elements`."""
    if hasattr(config, "estimated_elements"):
        own: int = config.estimated_elements()
        return own
    known = {field: getattr(config, field, 0) for field in SIZES}
    dim, heads = known["dim"], known["num_heads"]
    width = known["head_dim"] or -(-dim // heads)
    groups = known["num_kv_heads"] or heads
    layers = known["num_layers"] + 2 * (
        known["num_decoder_layers"] or (known["num_layers"] if known["num_buckets"] else 0)
    )
    activation = ACTIVATIONS.get(getattr(config, "activation", ""))
    gated = activation is not None and activation.gated
    usual = 8 * dim // 3 if gated and not known["num_buckets"] else 4 * dim
    mlp = (3 if gated else 2) * dim * (known["hidden"] or usual)
    layer = NUMBERS_OF_A_LAYER + 2 * dim * width * (heads + groups) + mlp
    positions = known["sequence_length"] * (
        width if getattr(config, "positions", "") == "rotary" else dim
    )
    if known["patch_size"]:
        positions += (known["image_size"] // known["patch_size"]) ** 2 * dim
        positions += known["num_channels"] * known["patch_size"] ** 2 * dim
    tables = known["vocab_size"] + known["num_types"] + known["num_labels"]
    return layers * layer + positions + tables * dim + known["num_buckets"] * heads


def largest_field(config: Any) -> str:
    """The size that is furthest from the usual one, of all that a configuration has."""
    usual = type(config).__dataclass_fields__
    if "widths" in usual:
        return "widths"
    found = [field for field in SIZES if field in usual]
    return max(found, key=lambda field: getattr(config, field) / max(1, usual[field].default))


def check_size(config: Any) -> None:
    """ValueError naming the field that makes a model larger than any memory."""
    for field in SIZES:
        if abs(getattr(config, field, 0)) >= 1 << 63:
            raise ValueError(
                f"{field} is {str(getattr(config, field))[:40]}; sizes are less than 2^63"
            )
    if config.num_heads < 1 or (numbers := estimated_elements(config)) <= MOST_NUMBERS:
        return
    field = largest_field(config)
    raise ValueError(
        f"{field} is {getattr(config, field)}; the model would take some "
        f"{4 * numbers / 2**40:.3g} TiB in fp32, which no "
        "memory holds: make it smaller"
    )
