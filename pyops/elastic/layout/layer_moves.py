"""Transition: from one layout to the next, each layer's state goes to the ranks that hold it then
and had it not.

    old   rank 0: layers 0 1 2   rank 1: layers 3 4 5       2 stages, 1 replica
    new   rank 0: layers 0 ... 5 rank 1: layers 0 ... 5     1 stage, 2 replicas
    moves 0: 0 -> 1, 1: 0 -> 1, 2: 0 -> 1, 3: 1 -> 0, 4: 1 -> 0, 5: 1 -> 0

    transition(states, old, new)       of all ranks' states: a pure function
    carry(state, old, new, group=...)  the same over a group, of this rank's state

The state of a layer: {"parameters": {name: tensor}, "slots": {name: {key: tensor or number}}}, or
any dicts, lists and tuples of tensors, numbers, strings and None that have "slots", what the
optimizer keeps, at their top. A frozen layer has none. What differs from rank to rank is in no
layer's state, and what all have alike (learning rate, epoch, cursor) need not go anywhere.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from pyops.comm.agreement import agree, gather
from pyops.comm.collectives.transport import Pending, ProcessGroupTransport
from pyops.comm.failure import PeerError, lost_peer
from pyops.elastic.layout.rank_layout import Layout
from pyops.mesh import check_initialized
from pyops.pipeline.transport.message import HEADER, MessageLayout, lay_out, pack, to_device, unpack

__all__ = ["LayerMove", "LayerState", "carry", "moves", "transition"]

LayerState = Mapping[str, Any]
UNDER_WAY = 4  # messages that a rank sends at a time


@dataclass(frozen=True)
class LayerMove:
    """A layer goes from `source` to the first of `targets`, from there to the second, and so on.

    Attributes:
        layer: The number of the layer.
        source: The rank that holds it.
        targets: The ranks that get it, in this order.
    """

    layer: int
    source: int
    targets: tuple[int, ...]


def moves(old: Layout, new: Layout) -> tuple[LayerMove, ...]:
    """What has to go where, by layer: to each rank that holds a layer in `new` and did not in
    `old`, once.

    The ranks that held a layer share in sending it, and each layer goes on from rank to rank, so
    that none sends a layer twice while another could.

    Raises:
        ValueError: Where there is no way from one to the other: other ranks or layers, or fewer
            frozen ones.
    """
    for what in ("ranks", "layer_count"):
        if getattr(old, what) != getattr(new, what):
            raise ValueError(
                f"the old layout has {what} {getattr(old, what)}, the new one "
                f"{getattr(new, what)}; only stages, replicas, "
                "boundaries, frozen layers and micro-batches may change"
            )
    if new.frozen < old.frozen:
        raise ValueError(
            f"{old.frozen} layers are frozen, and the new layout has {new.frozen}; what "
            "is frozen stays so: its slots are gone"
        )
    found: list[LayerMove] = []
    sent: Counter[int] = Counter()
    for layer in range(old.layer_count):
        holders = old.holders(layer)
        wanting = [rank for rank in new.holders(layer) if rank not in holders]
        sources = sorted(holders, key=lambda rank: (sent[rank], rank))[: len(wanting)]
        for i, source in enumerate(sources):
            targets = tuple(wanting[i :: len(sources)])
            found.append(LayerMove(layer, source, targets))
            sent.update((source, *targets[:-1]))
    return tuple(found)


def transition(
    states: Sequence[Mapping[int, LayerState]], old: Layout, new: Layout
) -> list[dict[int, LayerState]]:
    """states[rank] = {layer: state} of every rank in `old` -> the same in `new`; slots of frozen
    layers are dropped.

    What stays where it is is not copied, what moves is.

    Args:
        states: states[rank] is {layer: state} of that rank in the old layout.
        old: The layout that the states are in.
        new: The layout that they are to be in.

    Returns:
        The same in the new layout.

    Raises:
        ValueError: For states of other layers than `old` says.
    """
    for rank, state in enumerate(states):
        _check(state, rank, old)
    if len(states) != old.ranks:
        raise ValueError(f"there are states of {len(states)} ranks, but {old.ranks} ranks")
    after = [_kept(state, rank, new) for rank, state in enumerate(states)]
    for move in moves(old, new):
        given = _needed(states[move.source][move.layer], move.layer, new)
        for target in move.targets:
            after[target][move.layer] = tree_map(
                lambda x: x.detach().clone() if isinstance(x, Tensor) else x, given
            )
    return [dict(sorted(state.items())) for state in after]


def carry(
    state: Mapping[int, LayerState],
    old: Layout,
    new: Layout,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> dict[int, LayerState]:
    """This rank's {layer: state} in `new`, with the bits of `transition`. A collective: every rank
    of the layouts calls it.

    Before anything is sent, ValueError or TypeError on every rank for a state of other layers, for
    what can't be sent, for ranks that differ in the layouts. CommunicationError, which names it, on
    every rank, for a rank that is lost.

    Args:
        state: Of this rank in `old`; empty where it is idle.
        group: Of all ranks, in their order, that carries CPU tensors.
        device: Where what comes shall be; what stays is not touched. Layers go one at a time, each
            as one run of bytes; the tensors of a layer that came are views of one piece of memory.
    """
    check_initialized("carry", group)
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    described: dict[int, MessageLayout] = {}
    plan: tuple[LayerMove, ...] = ()
    error: Exception | None = None
    try:
        if size != old.ranks:
            raise ValueError(f"the layouts are of {old.ranks} ranks, but the group has {size}")
        _check(state, rank, old)
        plan = moves(old, new)
        described = {
            move.layer: lay_out(
                _needed(state[move.layer], move.layer, new), what=f"the state of layer {move.layer}"
            )
            for move in plan
            if move.source == rank
        }
    except (ValueError, TypeError) as caught:
        error = caught
    agree(error, group=group)
    fingerprints = gather(
        (old, new, {layer: each.end for layer, each in described.items()}), group=group
    )
    if (
        other := next(
            (
                r
                for r, fingerprint in enumerate(fingerprints)
                if fingerprint[:2] != fingerprints[0][:2]
            ),
            None,
        )
    ) is not None:
        raise ValueError(
            f"rank 0 goes from {fingerprints[0][0]} to {fingerprints[0][1]}, but rank {other} from "
            f"{fingerprints[other][0]} to {fingerprints[other][1]}; "
            "give all ranks the same"
        )
    after = _kept(state, rank, new)
    if size > 1:
        parcels = [(move, fingerprints[move.source][2][move.layer]) for move in plan]
        for layer, message in _passed_on(parcels, described, rank, group).items():
            view = message.numpy().data
            after[layer] = to_device(
                unpack(message, view, HEADER.unpack_from(view)), torch.device(device)
            )
        gather(
            None, group=group
        )  # nobody goes on before all have theirs: a rank that is lost is lost to all
    return dict(sorted(after.items()))


def _passed_on(
    parcels: Sequence[tuple[LayerMove, int]],
    described: Mapping[int, MessageLayout],
    rank: int,
    group: dist.ProcessGroup | None,
) -> dict[int, Tensor]:
    """{layer: message} of what came to this rank. parcels: the moves, in the same order on all
    ranks, and the bytes of each."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    transport = ProcessGroupTransport(group)
    came: dict[int, Tensor] = {}
    sending: deque[Pending] = deque()
    try:
        for move, nbytes in parcels:
            chain = (move.source, *move.targets)
            if rank not in chain:
                continue
            place = chain.index(rank)
            if place == 0:
                message = pack(described[move.layer])
            else:
                message = came[move.layer] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                transport.post([], [(message, chain[place - 1])]).wait()
            if place + 1 < len(chain):
                while len(sending) >= UNDER_WAY:
                    sending.popleft().wait()
                sending.append(transport.post([(message, chain[place + 1])], []))
        while sending:
            sending.popleft().wait()
    except PeerError as error:
        raise lost_peer(
            "handing layers to other ranks", group=group, cause=error, sequence=0
        ) from error
    return came


def _check(state: Mapping[int, LayerState], rank: int, layout: Layout) -> None:
    expected = list(layout.layers(rank))
    if sorted(state) != expected:
        raise ValueError(
            f"rank {rank} gives states of layers {sorted(state)}, but holds {expected}; "
            "give those, each once"
        )


def _kept(state: Mapping[int, LayerState], rank: int, new: Layout) -> dict[int, LayerState]:
    return {
        layer: _needed(each, layer, new)
        for layer, each in state.items()
        if layer in new.layers(rank)
    }


def _needed(state: LayerState, layer: int, new: Layout) -> LayerState:
    """The state of a layer without what it does not need in `new`."""
    if layer >= new.frozen or not state.get("slots"):
        return state
    return {**state, "slots": {}}
