"""How large the gradient of each parameter is, put together from what the ranks own of it.

rank 0 owns   w[:6] b[:0]   12.5   0.0 --.
rank 1 owns   w[6:] b[:3]    3.5   2.0 --+-- w 16.0   b 2.0   one sum over the ranks, one number for
                                                              a parameter
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.comm.buckets.grad_norm import squares_of_each
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.zero.layout.parameters import FlatParameters
from pyops.zero.update.sharded_optimizer_state import ShardedOptimizerState

__all__ = ["squares_by_name"]


def squares_by_name(
    owned: ShardedOptimizerState, flats: Sequence[FlatParameters], communicator: Communicator | None
) -> dict[str, Tensor]:
    """{name: sum of squares of the gradient}, float64, 0 where there is none; views of one tensor.

    Args:
        communicator: Of the ranks that own parts; None where this one owns everything.
    """
    names = [name for flat in flats for name in flat.names]
    place = {name: i for i, name in enumerate(names)}
    squares = torch.zeros(len(names), dtype=torch.float64, device=flats[0].device)
    for each in owned.all_pieces():
        gradient = each.gradient
        if gradient is not None and gradient.numel():
            squares[place[each.name]] = squares_of_each([gradient])[0].to(squares.device)
    if communicator is not None:
        all_reduce(squares, communicator=communicator, label="squares of gradients")
    return dict(zip(names, squares.unbind(), strict=True))
