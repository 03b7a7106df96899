"""All parameters of one dtype in one aligned tensor, all their gradients in another, and views
handed out.

    registration order   embed.weight   block.0.weight   block.0.bias   head.weight
    backward order       | head.weight |pad| block.0.bias |pad| block.0.weight | embed.weight |pad|
                           ^ offset 0, ready first in backward                 ^ ready last
    the last padding     up to a multiple of multiple_of

Every offset is a multiple of ALIGNMENT elements, so that kernels read whole vectors. Padding is
zero and stays zero: its gradient is zero. A bucket of a collective, and the shard that an optimizer
steps, is a slice of the buffer: nothing is copied in or out.
"""

from pyops.flat.buffer import FlatBuffer
from pyops.flat.channels import ChannelPart, ChannelSet
from pyops.flat.layout import ALIGNMENT, FlatLayout
from pyops.flat.placement import Cut, Placement
from pyops.flat.places import (
    InPlace,
    check_free,
    check_watches,
    claim,
    owner_of,
    release,
    watches_of,
)
from pyops.flat.shard import (
    Box,
    Shard,
    ShardElsewhere,
    Shards,
    TensorElsewhere,
    boxes_of_range,
    meeting,
    whole_of_boxes,
)

__all__ = [
    "ALIGNMENT",
    "Box",
    "ChannelPart",
    "ChannelSet",
    "Cut",
    "FlatBuffer",
    "FlatLayout",
    "InPlace",
    "Placement",
    "Shard",
    "ShardElsewhere",
    "Shards",
    "TensorElsewhere",
    "boxes_of_range",
    "check_free",
    "check_watches",
    "claim",
    "meeting",
    "owner_of",
    "release",
    "watches_of",
    "whole_of_boxes",
]
