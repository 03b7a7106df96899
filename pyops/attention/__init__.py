"""Which blocks of queries see which blocks of keys: sparse patterns as data, and documents in a
row.

    pattern --layout(length, heads=, block=, causal=)--> BlockLayout --> pyops.ops.attention
    Dense, Fixed, Variable, BigBird, Longformer, SlidingWindow          a | b: what one of both sees
    from_mask_function(function)      any rule of blocks
    pattern_from_text("BigBird(seed=1)")    as configurations have it; str(pattern) gives it back
    from_deepspeed(section)           a "sparse_attention" section, with what differs here and why
    PatternLayouts(pattern, heads=).of(length)    the layouts that a layer asks for, kept
    pattern.draw("bigbird.svg")       a picture
    document_ids, document_starts, document_positions    documents side by side in a row of tokens
    apply(model, pattern)    for models of transformers, through their registry
    interpolate_positions(model, length)    longer rows for a model with learned positions

A pattern needs no random state and no message: every rank builds the same layout, or exactly the
part of it that its heads have.
"""

from pyops.attention.applied.longer_positions import interpolate_positions
from pyops.attention.applied.transformers_attention import apply
from pyops.attention.deepspeed import DeepSpeedPattern, from_deepspeed
from pyops.attention.documents import document_ids, document_positions, document_starts
from pyops.attention.layouts import PatternLayouts
from pyops.attention.local_windows import Fixed, Variable
from pyops.attention.pattern import BlockFunction, Pattern, PatternUnion, from_mask_function
from pyops.attention.pattern_text import pattern_from_text
from pyops.attention.picture import draw
from pyops.attention.windows import BigBird, Dense, Longformer, SlidingWindow
from pyops.ops.attention import BlockLayout

__all__ = [
    "BigBird",
    "BlockFunction",
    "BlockLayout",
    "DeepSpeedPattern",
    "Dense",
    "Fixed",
    "Longformer",
    "Pattern",
    "PatternLayouts",
    "PatternUnion",
    "SlidingWindow",
    "Variable",
    "apply",
    "document_ids",
    "document_positions",
    "document_starts",
    "draw",
    "from_deepspeed",
    "from_mask_function",
    "interpolate_positions",
    "pattern_from_text",
]
