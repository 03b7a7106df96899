"""The other axis: ranks that share parameters out among them, each with its own data-parallel
group.

        tp ->   0        1
dp  0        [W left] [W right]   reduce-scatter and all-gather down a column, as without tensor
                                  parallelism;
    1        [W left] [W right]   norms and partial gradients along a row, in one message each
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.flat import Placement
from pyops.mesh import ProcessGroupLike
from pyops.zero.checks import check_crossing, goes_by_layers
from pyops.zero.hooks.sharded_gradients import ShardedGradients
from pyops.zero.update.sharded_optimizer_state import ParamShard

__all__ = ["TensorParallelAxis"]


class TensorParallelAxis:
    """What ZeroOptimizer does over `group`, whose ranks share the model's parameters as their
    placements say.

    placements: of every parameter, by name.
    """

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer_class: type,
        *,
        tp_group: dist.ProcessGroup | None,
        group: ProcessGroupLike,
    ) -> TensorParallelAxis | None:
        """None without a tp_group of several ranks.

        Raises:
            ValueError: Unless the groups meet in this rank alone.
        """
        if tp_group is None or dist.get_world_size(tp_group) == 1:
            return None
        if goes_by_layers(optimizer_class):
            raise ValueError(
                f"ZeroOptimizer: {optimizer_class.__name__} goes by sums over each "
                "layer, of which a tensor-parallel rank "
                "has a part; take an optimizer that steps each element by itself, such "
                "as AdamW, or tp_group=None"
            )
        return cls(model, tp_group=tp_group, group=group)

    def __init__(
        self, model: nn.Module, *, tp_group: dist.ProcessGroup, group: ProcessGroupLike
    ) -> None:
        check_crossing("tp", tp_group, group)
        self.communicator = Communicator.of(tp_group)
        rank, ranks = self.communicator.rank, self.communicator.size
        known = Placement.of(model)
        self.placements = {
            name: known.get(name) or Placement.whole(parameter.shape, rank=rank, ranks=ranks)
            for name, parameter in model.named_parameters()
        }

    def finish(self, pieces: Sequence[ParamShard], gradients: ShardedGradients) -> None:
        """Sum what each rank has of a gradient only in part, in one message for each dtype; in
        place."""
        partial: dict[torch.dtype, list[tuple[Tensor, int, int]]] = {}
        size = self.communicator.size
        for each in pieces:
            chunk = gradients.of_flat[each.flat][each.piece.bucket].chunk
            if (
                each.placement is None
                or not each.placement.partial
                or chunk is None
                or not each.piece.numel
            ):
                continue
            # Ranks that hold other elements of the parameter send them side by side.
            groups, index = size // each.placement.copies, each.placement.index
            partial.setdefault(chunk.dtype, []).append((chunk[each.piece.of_chunk], groups, index))
        for dtype, parts in partial.items():
            message = torch.zeros(
                sum(t.numel() * n for t, n, _ in parts), dtype=dtype, device=parts[0][0].device
            )
            places, at = [], 0
            for gradient, groups, index in parts:
                n = gradient.numel()
                places.append(message[at + index * n : at + (index + 1) * n].copy_(gradient))
                at += groups * n
            all_reduce(
                message,
                communicator=self.communicator,
                label="partial gradients of tensor-parallel ranks",
            )
            for (gradient, _, _), place in zip(parts, places, strict=True):
                gradient.copy_(place)
