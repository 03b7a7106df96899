"""Which blocks of queries see which blocks of keys: sparse patterns as data, and documents in a
row.

    pattern --layout(length, heads=, block=, causal=)--> BlockLayout --> pyops.ops.attention
    Dense, Fixed, Variable, BigBird, Longformer, SlidingWindow          a | b: what one of both sees
    from_mask_function(function)      any rule of blocks
    from_deepspeed(section)           a "sparse_attention" section, with what differs here and why
    pattern.draw("bigbird.svg")       a picture
    document_ids, document_starts, document_positions    documents side by side in a row of tokens
    interpolate_positions(model, length)    longer rows for a model with learned positions

A pattern needs no random state and no message: every rank builds the same layout, or exactly the
part of it that its heads have.
"""

from pyops.attention.deepspeed import DeepSpeedPattern, from_deepspeed
from pyops.attention.documents import document_ids, document_positions, document_starts
from pyops.attention.local_windows import Fixed, Variable
from pyops.attention.longer_positions import interpolate_positions
from pyops.attention.pattern import BlockFunction, Pattern, PatternUnion, from_mask_function
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
    "PatternUnion",
    "SlidingWindow",
    "Variable",
    "document_ids",
    "document_positions",
    "document_starts",
    "draw",
    "from_deepspeed",
    "from_mask_function",
    "interpolate_positions",
]
