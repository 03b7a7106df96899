"""A third axis: ranks that hold other layers of the model, the stages of a pipeline.

pp  0   embedding, block 0   norms, and whether to step at all, over all stages in one small
                             message;
    1   block 1, block 2     the gradient of a parameter that several stages hold, such as a head
                             that is tied
    2   block 3, head        to the embedding, is the sum of theirs: each sends the others its part
                             of it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import gather
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.failure import lost_peer
from pyops.flat import Placement, Shard, Shards
from pyops.mesh import ProcessGroupLike
from pyops.zero.checks import check_crossing
from pyops.zero.hooks.sharded_gradients import ShardedGradients
from pyops.zero.update.sharded_optimizer_state import ParamShard

__all__ = ["PipelineAxis", "check_stages"]

TAG = 0x74696564  # of the exchange of gradients


def _alone(pp_group: dist.ProcessGroup | None) -> bool:
    return pp_group is None or dist.get_world_size(pp_group) == 1


def check_stages(pp_group: dist.ProcessGroup | None, *, group: ProcessGroupLike) -> None:
    """ValueError unless the groups meet in this rank alone."""
    if _alone(pp_group) or pp_group is None:
        return
    check_crossing("pp", pp_group, group)


class PipelineAxis:
    """What ZeroOptimizer does over `pp_group`, each of whose ranks has some of the model's
    parameters, by their names there.

    holders: {name: ranks of the group} of the parameters that several of them have. Those must
    begin with the same values.
    """

    @classmethod
    def of(cls, model: nn.Module, *, pp_group: dist.ProcessGroup | None) -> PipelineAxis | None:
        """None without a pp_group of several ranks."""
        return None if _alone(pp_group) or pp_group is None else cls(model, pp_group=pp_group)

    def __init__(self, model: nn.Module, *, pp_group: dist.ProcessGroup) -> None:
        self.group, self.communicator = pp_group, Communicator.of(pp_group)
        self.rank = self.communicator.rank
        everyone = gather([name for name, _ in model.named_parameters()], group=pp_group)
        self.holders: dict[str, list[int]] = {}
        for name in dict.fromkeys(name for names in everyone for name in names):
            having = [rank for rank, names in enumerate(everyone) if name in names]
            if len(having) > 1:
                self.holders[name] = having
        self.apart = {id(p) for name, p in model.named_parameters() if name in self.holders}
        # A second name of a parameter is in a state, too, and the first holder of it may not have
        # that.
        states = gather(list(model.state_dict()), group=pp_group)
        self._written = set(states[self.rank]) - {
            name for names in states[: self.rank] for name in names
        }
        self._elsewhere = {name for names in states for name in names} - set(states[self.rank])
        self._exchanges = 0

    def place(self, placements: Mapping[str, Placement], model: nn.Module) -> dict[str, Placement]:
        """The placements, in which the first holder alone measures and saves what several have."""
        found = dict(placements)
        for name, parameter in model.named_parameters():
            if self.rank in self.holders.get(name, [])[1:]:
                found[name] = replace(
                    found.get(name) or Placement.whole(parameter.shape, rank=0, ranks=1),
                    first=False,
                )
        return found

    def finish(self, pieces: Sequence[ParamShard], gradients: ShardedGradients) -> None:
        """Sum the gradients of what several ranks have, in the order of the ranks: the same bits on
        each; in place."""
        self._exchanges += 1
        for each in sorted(
            (piece for piece in pieces if piece.name in self.holders), key=lambda piece: piece.name
        ):
            chunk = gradients.of_flat[each.flat][each.piece.bucket].chunk
            if chunk is None or not each.piece.numel:
                continue
            mine = chunk[each.piece.of_chunk]
            parts = {
                rank: mine if rank == self.rank else torch.empty_like(mine)
                for rank in self.holders[each.name]
            }
            self._exchange(
                mine,
                {rank: part for rank, part in parts.items() if rank != self.rank},
                name=each.name,
            )
            total = parts[min(parts)].clone()
            for rank in sorted(parts)[1:]:
                total += parts[rank]
            mine.copy_(total)

    def _exchange(self, mine: Tensor, theirs: Mapping[int, Tensor], *, name: str) -> None:
        """Send what is `mine` to each, and receive what is theirs."""
        try:
            works: list[Any] = dist.batch_isend_irecv(
                [
                    dist.P2POp(operation, tensor, group=self.group, group_peer=rank, tag=TAG)
                    for rank, part in theirs.items()
                    for operation, tensor in ((dist.isend, mine), (dist.irecv, part))
                ]
            )
            for work in works:
                work.wait()
        except RuntimeError as error:
            what = f"the sum of the gradients of {name} over the stages"
            raise lost_peer(
                what, group=self.group, cause=error, sequence=self._exchanges
            ) from error

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a whole model without what only other ranks have."""
        return {name: value for name, value in state.items() if name not in self._elsewhere}

    def share(
        self, state: Mapping[str, Any], *, copies: Sequence[Communicator | None]
    ) -> dict[str, Any]:
        """The model's state as every rank writes its own layers': parts of a whole that not every
        rank has.

        Args:
            copies: The ranks that have the same layers, in which the first one writes whole
                tensors.
        """
        copy = any(each is not None and each.rank > 0 for each in copies)
        found: dict[str, Any] = {}
        for name, value in state.items():
            writes = name in self._written
            if isinstance(value, Tensor):
                found[name] = Shard(
                    tuple(value.shape), (0,) * value.dim(), value, copy=copy or not writes
                )
            else:
                parts = (value,) if isinstance(value, Shard) else tuple(value)
                found[name] = Shards(
                    tuple(replace(part, copy=part.copy or not writes) for part in parts)
                )
        return found
