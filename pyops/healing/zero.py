"""HealingZero: ZeRO whose ranks are lost and replaced: states that are spread have copies.

step t    copies of states t to the neighbor | loss, backward, reduce-scatter | states t + 1
          '------------- a rank is lost -------> the others share out states t anew, repeat it
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from pyops.failure import CommunicationError
from pyops.flat import Shard
from pyops.healing.peer_copies import PeerCopies, Wanted
from pyops.healing.quorum import QuorumConfig
from pyops.healing.repeated_step import Compute, HasState, HealingReplica, Part, check_not_cut
from pyops.zero import ZeroConfig, ZeroOptimizer
from pyops.zero.optimizer_factory import MakesOptimizer

__all__ = ["HealingZero", "check_healable", "ranges_of_states"]

STAGE_1 = ZeroConfig(stage=1)
CLOSINGS = 10  # each of which learns of one collective more that failed


class HealingZero(HealingReplica):
    """ZeRO of stage 0 or 1 over the replicas that live, each one process on Gloo, in place of
    ZeroOptimizer and of the process group.

        replica = HealingZero(model, pyops.optim.AdamW, ZeroConfig(stage=1), store, lr=3e-4)
        while replica.steps < 1000:
            loss = replica.step(compute)
        replica.close()

    Before a step each rank copies its part of parameters and states into its host memory and that
    of its neighbor: the rank at the same place of another host, the next one where there is one
    host. Where a rank is lost, the others leave the group, meet, share out the states of the last
    copy anew, and repeat the steps since then. So does a replica that joins.

    With P parameters in fp32 and AdamW, N replicas: a rank sends 12 P / N bytes more in each step
    that is copied (beside 8 P (N - 1) / N of gradients and parameters), and keeps 24 P / N in host
    memory, twice as much while it copies. `QuorumConfig.copy_every` copies less often.

    Two neighbors that are lost at once take a part of the states with them: `step` raises
    StateLostError on all that are left.

    Args:
        model: The same on every replica up to the values.
        optimizer: The inner optimizer's class, or what makes it; see ZeroOptimizer.
        store: A store of torch.distributed that all replicas reach and none of them holds.
        zero: What is spread; stages 0 and 1, without offload, delays or symmetric memory.
        config: How many replicas are enough, how long they wait, how often states are copied.
        extra: By name, what else has a state, the same on every replica.
        optimizer_arguments: Of the inner optimizer: lr=3e-4, say.

    Attributes:
        steps: How many have been taken; fewer than before where steps are taken again.
        quorum: Who is there.
        optimizer: The ZeroOptimizer, made anew at each meeting; None before the first. Set learning
            rates in its `param_groups`, in `compute`.

    Raises:
        ValueError: There is a process group; what can't be healed: stages 2 and 3, an option that
            keeps states elsewhere, parameters that are cut over ranks. Nothing is changed.
        CommunicationError: In `step`: see `HealingReplica.step`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakesOptimizer,
        store: dist.Store,
        zero: ZeroConfig = STAGE_1,
        *,
        config: QuorumConfig | None = None,
        extra: Mapping[str, HasState] | None = None,
        **optimizer_arguments: Any,
    ) -> None:
        zero.validate("HealingZero: ")
        check_healable(zero)
        check_not_cut(model)
        self.optimizer: ZeroOptimizer | None = None
        self._inner, self._zero, self._arguments = optimizer, zero, optimizer_arguments
        self._copies = PeerCopies()
        self._copied = -1
        super().__init__(model, store, config=config, extra=extra, steps=0)

    def close(self) -> None:
        """Leave, at the end of training: call it after the same step on all replicas. A collective.

        Where one is lost whose states the others need for that step, all take it again.
        """
        last, over = self.steps, self._compute is None
        while not over and self._compute is not None:
            while not self._met or self.steps < last:
                if self._met:
                    self.step(self._compute)
                else:
                    self._heal()
            try:
                self._end_together()
                over = True
            except CommunicationError as error:
                self._failed(error)
        super().close()

    def _take(self, compute: Compute, part: Part) -> tuple[Tensor, int]:
        assert self.optimizer is not None
        due = self.steps % self.quorum.config.copy_every == 0
        if self._copied < 0 or (due and self._copied != self.steps):
            self._copies.save(self.steps, self._state(self.optimizer))
            self._copied = self.steps
        self.optimizer.zero_grad()
        return compute(self.model, part)

    def _apply(self, loss: Tensor, *, rows: float) -> None:
        assert self.optimizer is not None
        self._copies.settle()  # the rows of all came after the copies of all
        mean = self._zero.reduction == "mean"
        share = (dist.get_world_size() if mean else 1) / rows
        self.optimizer.scale(loss * share).backward()
        self.optimizer.step()
        with self.optimizer.whole_parameters():
            pass  # those of other ranks have come

    def _let_go(self) -> None:
        zero, self.optimizer = self.optimizer, None
        for _ in range(CLOSINGS):
            if zero is None or zero.closed:
                return
            with suppress(CommunicationError):
                zero.close()

    def _begin(self, group: dist.ProcessGroup, steps: list[int]) -> None:
        """All take up the newest state of which they have every part."""
        self._copies.join(group)
        zero = ZeroOptimizer(self.model, self._inner, self._zero, group=group, **self._arguments)
        self.optimizer, self._copied = zero, -1
        if zero.one_bit is not None:
            raise ValueError(
                "HealingZero: the optimizer compresses gradients to 1 bit, whose errors are those "
                "of a lost rank alone; use pyops.optim.AdamW, say"
            )
        found = self._copies.recover(ranges_of_states(zero, under=("optimizer", "state")))
        if found is None:
            return
        self.steps, state = found
        zero.load_model_state_dict(state["model"])
        zero.load_state_dict(state["optimizer"])
        for name, each in self.extra.items():
            each.load_state_dict(state["extra"][name])

    def _signature(self) -> list[tuple[Any, ...]]:
        name = getattr(self._inner, "__name__", type(self._inner).__name__)
        return [*self._tensors(), ("optimizer", name), ("ZeRO stage", self._zero.stage)]

    def _state(self, zero: ZeroOptimizer) -> dict[str, Any]:
        trained = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        first = dist.get_rank() == 0
        model = {
            name: tensor if name in trained else _of_first(tensor, first=first)
            for name, tensor in zero.model_state_dict().items()
        }
        optimizer = zero.state_dict()
        if not zero.stage:  # every rank has all of them
            optimizer = {**optimizer, "state": _whole(optimizer["state"])}
        extra = {name: each.state_dict() for name, each in self.extra.items()}
        return {"model": model, "optimizer": optimizer, "extra": extra}


def check_healable(zero: ZeroConfig, prefix: str = "HealingZero: ") -> None:
    """Refuse what a lost rank would take with it.

    Args:
        zero: What is spread, and how.
        prefix: Begins the message, before the name of the field.

    Raises:
        ValueError: It names field, value and fix.
    """
    if zero.stage > 1:
        raise ValueError(
            f"{prefix}stage is {zero.stage}, which spreads gradients or parameters, and the part "
            "of a lost rank can't be healed; set it to 1, or restart from a checkpoint"
        )
    refused = {"offload": "none", "delayed_update": False, "symmetric_step": False}
    for name, allowed in refused.items():
        if (value := getattr(zero, name)) != allowed:
            raise ValueError(
                f"{prefix}{name} is {value!r}, whose states are not beside the parameters and "
                f"can't be healed; set it to {allowed!r}"
            )


def ranges_of_states(zero: ZeroOptimizer, *, under: tuple[str, ...]) -> Wanted:
    """What of a recovered state this rank takes up: its own ranges of the optimizer's states.

    Args:
        zero: The optimizer that takes it.
        under: The keys under which the state has names of parameters, and under these states.
    """
    ranges: dict[str, list[tuple[int, int]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for each in zero.owned.all_pieces():
        shapes[each.name] = tuple(each.shape)
        if each.piece.numel:
            piece = each.piece.of_tensor
            ranges.setdefault(each.name, []).append((piece.start, piece.stop))

    def wanted(path: tuple[Any, ...], shape: tuple[int, ...]) -> list[tuple[int, int]] | None:
        if path[: len(under)] != under or not shape:
            return None
        name = path[len(under)]
        if name not in shapes:
            return []
        return ranges.get(name, []) if shape == shapes[name] else None

    return wanted


def _of_first(tensor: Tensor, *, first: bool) -> Shard:
    """A buffer, which each rank has its own values of: those of the first are taken."""
    shape = tuple(tensor.shape)
    return Shard(shape, (0,) * len(shape), tensor, copy=not first)


def _whole(states: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors in the place of shards that are whole on every rank."""
    return {
        name: {
            key: value.tensor.reshape(value.global_shape) if isinstance(value, Shard) else value
            for key, value in of_parameter.items()
        }
        for name, of_parameter in states.items()
    }
