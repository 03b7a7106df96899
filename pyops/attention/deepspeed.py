"""The "sparse_attention" section of a DeepSpeed configuration as a pattern, and where its rule
differs here, with the reason.

    made = from_deepspeed({"mode": "bigbird", "block": 16, "num_random_blocks": 2})
    made.pattern.layout(4096, heads=16, block=made.block, causal=made.causal)
    print(*made.differences, sep="\\n")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyops.attention.local_windows import Fixed, Variable
from pyops.attention.pattern import Pattern
from pyops.attention.windows import BigBird, Dense, Longformer, SlidingWindow
from pyops.ops.attention.block_tables import check_sizes

__all__ = ["DeepSpeedPattern", "from_deepspeed"]

BLOCK = 16  # DeepSpeed's default
WIDTH = "num_sliding_window_blocks"
GLOBAL = ("global_block_indices", "global_block_end_indices")
MODES: dict[str, tuple[type[Pattern], tuple[str, ...]]] = {
    "dense": (Dense, ()),
    "fixed": (
        Fixed,
        (
            "num_local_blocks",
            "num_global_blocks",
            "horizontal_global_attention",
            "num_different_global_patterns",
        ),
    ),
    "variable": (
        Variable,
        ("num_random_blocks", "local_window_blocks", *GLOBAL, "horizontal_global_attention"),
    ),
    "bigbird": (BigBird, ("num_random_blocks", WIDTH, "num_global_blocks")),
    "bslongformer": (Longformer, (WIDTH, *GLOBAL)),
    "local_sliding_window": (SlidingWindow, (WIDTH,)),
}
COMMON = ("mode", "block", "different_layout_per_head", "attention")


@dataclass(frozen=True)
class DeepSpeedPattern:
    """What a section says."""

    pattern: Pattern
    """The rule."""
    block: int
    """Tokens of a block's side."""
    causal: bool
    """Whether the section's attention is unidirectional."""
    differences: tuple[str, ...]
    """Sentences: what DeepSpeed does otherwise with this section, and why it is not done here."""


def from_deepspeed(section: Mapping[str, Any], *, seed: int = 0) -> DeepSpeedPattern:
    """Read a section "sparse_attention"; keys that are left out have DeepSpeed's defaults.

    Args:
        section: Its keys and values; "mode" may also be "local_sliding_window", which DeepSpeed has
            as a class alone.
        seed: Of random blocks, which DeepSpeed draws from Python's global generator.

    Returns:
        The pattern, its block and causality, and what differs.

    Raises:
        ValueError: For an unknown mode, key or attention, or a value that the pattern refuses;
            TypeError for a value of another type.
    """
    mode = section.get("mode", "fixed")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; choose one of {', '.join(MODES)}")
    kind, names = MODES[mode]
    if unknown := sorted(set(section) - {*COMMON, *names}):
        raise ValueError(
            f"a section of mode {mode!r} has no {', '.join(unknown)}; it may have "
            f"{', '.join((*COMMON, *names))}"
        )
    values = {name: _value(name, section[name]) for name in section}
    causal = _causal(mode, section)
    block = values.get("block", BLOCK)
    check_sizes(block, 0, 0)
    options = {name: values[name] for name in names if name in values}
    by_head = values.get("different_layout_per_head", False)
    differences = []
    if mode == "fixed" and options.get("num_different_global_patterns", 1) > 1 and not by_head:
        raise ValueError(
            f"num_different_global_patterns is {options['num_different_global_patterns']}, but "
            "different_layout_per_head is false; set it to true, or use one pattern"
        )
    if (width := options.get(WIDTH, 3)) > 0 and width % 2 == 0:
        differences.append(
            f"{WIDTH} is {width}, which DeepSpeed rounds to {width + 1} without "
            "saying so; a window has a middle, so the pattern has that odd width"
        )
        options[WIDTH] += 1
    if "num_random_blocks" in names:
        options |= {"different_layout_per_head": by_head, "seed": seed}
        differences += _of_random_blocks(mode, options, causal=causal)
    made = kind(**options)
    return DeepSpeedPattern(
        made, block, causal, (*differences, *_of_rules(made, causal=causal), *ALWAYS)
    )


ALWAYS = (
    "DeepSpeed builds one layout for the longest sequence and cuts it, which is another pattern "
    "than that of a shorter sequence; here a layout is built for the length at hand, of any number "
    "of tokens",
    "a row that sees no key gives NaN in DeepSpeed; here it gives 0",
)


def _of_random_blocks(mode: str, options: dict[str, Any], *, causal: bool) -> list[str]:
    """Sets the default that a section has, and says what differs in the drawing."""
    found = []
    if "num_random_blocks" not in options:
        options["num_random_blocks"] = 0
        if mode == "bigbird":
            found.append(
                "num_random_blocks is left out: 0 in a DeepSpeed section, as here, but 1 in "
                "DeepSpeed's class and in BigBird"
            )
    if not options["num_random_blocks"]:
        return found
    found.append(
        "random blocks come from (seed, head, row) alone, the same on every rank; DeepSpeed draws "
        "from Python's global generator, on each rank others, and sends those of rank 0 in the "
        "first forward"
    )
    if causal and mode == "bigbird":
        found.append(
            "a row with fewer blocks up to the diagonal than num_random_blocks takes them all; "
            "DeepSpeed raises an error there"
        )
    if causal and mode == "variable":
        found.append(
            "random blocks of a row are drawn up to the diagonal; DeepSpeed draws from all, and a "
            "query sees later keys"
        )
    return found


def _of_rules(made: Pattern, *, causal: bool) -> list[str]:
    """What differs in a pattern's rule."""
    found = []
    if isinstance(made, Fixed) and causal and made.num_global_blocks > 1:
        found.append(
            "global columns are seen from the diagonal on; DeepSpeed sets several columns from the "
            "first one's row on, and a query sees later keys"
        )
    if isinstance(made, Variable) and causal and made.global_block_end_indices is not None:
        found.append(
            "a range of global blocks is seen from the diagonal on; DeepSpeed sets it from its "
            "first row on, and a query sees later keys"
        )
    if isinstance(made, (Variable, Longformer)):
        found.append(
            "global blocks beyond the last block are refused; DeepSpeed leaves them out, and takes "
            "-1 for the last block"
        )
    if isinstance(made, (Fixed, Variable)) and causal and made.horizontal_global_attention:
        found.append(
            "horizontal_global_attention with unidirectional attention gives rows up to the "
            "diagonal; DeepSpeed refuses both together"
        )
    if causal:
        found.append(
            "causality is exact to the token; DeepSpeed's kernels show a block on the diagonal "
            "whole, and leave the rest to the caller's attn_mask"
        )
    return found


def _causal(mode: str, section: Mapping[str, Any]) -> bool:
    default = "unidirectional" if mode == "local_sliding_window" else "bidirectional"
    attention = section.get("attention", default)
    if attention not in ("bidirectional", "unidirectional"):
        raise ValueError(f"attention is {attention!r}; choose one of bidirectional, unidirectional")
    return bool(attention == "unidirectional")


def _value(name: str, value: Any) -> Any:
    """The value as a pattern takes it: lists as tuples."""
    if name in ("mode", "attention"):
        return value
    if name in (*GLOBAL, "local_window_blocks"):
        if value is None and name == GLOBAL[1]:
            return None
        if not isinstance(value, list | tuple) or any(type(each) is not int for each in value):
            raise TypeError(f"{name} is {value!r}; give a list of whole numbers")
        return tuple(value)
    flag = name in ("different_layout_per_head", "horizontal_global_attention")
    if type(value) is not (bool if flag else int):
        raise TypeError(
            f"{name} is {value!r}; give {'true or false' if flag else 'a whole number'}"
        )
    return value
