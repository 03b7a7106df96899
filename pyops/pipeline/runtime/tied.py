"""Tied weights: a parameter that layers of several stages share, such as an embedding that is the
head's weight as well.

    rank 0   embedding.weight   gradient g0 --.       .-- g0 + g3      each rank has its own copy
    rank 3   head.weight        gradient g3 --+- sum -+-- g0 + g3

When a step ends, all copies have the sum of the gradients, with the same bits: what starts equal,
and is stepped alike, stays equal.

In one process the parameter is one object, and autograd adds to its one gradient. Norms over the
pipeline count it once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import gather, ranks_agree
from pyops.comm.failure import PeerError
from pyops.mesh import ProcessGroupLike, resolve
from pyops.pipeline.schedules.orders import Orders

__all__ = ["TiedParameters", "tied_names"]

Names = tuple[str, ...]


class TiedParameter(NamedTuple):
    """A parameter and the ranks that hold a copy, in the order of their first stages that do."""

    parameter: nn.Parameter
    holders: list[int]


def tied_names(
    layers: Sequence[nn.Module],
    boundaries: Sequence[int],
    *,
    declared: Iterable[Sequence[str]] = (),
    group: ProcessGroupLike = None,
) -> tuple[Names, ...]:
    """Groups of names ("0.weight", "5.head.weight": the layer's number, the name in it) of one
    parameter in several stages. Collective.

    What any rank finds holds for all: layers that one rank has on the meta device may be real ones
    on another, where nothing shows that they are tied.

    Args:
        layers: All layers of the model.
        boundaries: The first layer of each stage, and the number of layers.
        declared: Groups of names of parameters that are one although they are not one object.
        group: The ranks of the pipeline.

    Raises:
        ValueError: On every rank alike, for names that no layer has, and for parameters that differ
            in shape or dtype.
    """
    parameters = {
        f"{i}.{name}": p
        for i, layer in enumerate(layers)
        for name, p in layer.named_parameters(remove_duplicate=False)
    }
    shared: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        shared.setdefault(id(parameter), []).append(name)
    with ranks_agree(group):
        given = [tuple(names) for names in declared]
        for name in itertools.chain(*given):
            if name not in parameters:
                raise ValueError(
                    f"tied names {name!r}, which no layer has; write the layer's number "
                    "and the parameter's name in it, such "
                    f"as {next(iter(parameters), '0.weight')!r}"
                )
    found = [*given, *(tuple(names) for names in shared.values() if len(names) > 1)]
    merged = _merged(itertools.chain(*gather(found, group=group)), list(parameters))
    stage_of = {name: _stage_of(int(name.split(".")[0]), boundaries) for name in parameters}
    across = tuple(names for names in merged if len({stage_of[name] for name in names}) > 1)
    with ranks_agree(group):
        for names in across:
            _check_alike(names, parameters)
    return across


class TiedParameters:
    """The tied parameters of which this process has a copy.

    Args:
        named: The parameters of this process by their names.
        names: Groups of names, from `tied_names`.
        boundaries: The first layer of each stage, and the number of layers.
        orders: Tells which rank has which stage.
        group: The ranks of the pipeline.
        tag: Of messages that nobody else sends.

    Raises:
        ValueError: On every rank alike, where a rank has two copies of one parameter, or an fp32
            sum (`main_grad`) of one.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        names: Sequence[Names],
        boundaries: Sequence[int],
        orders: Orders,
        *,
        group: ProcessGroupLike,
        tag: int,
    ) -> None:
        self.group, self.tag = resolve(group, "TiedParameters"), tag
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.ties: list[TiedParameter] = []
        with ranks_agree(group):
            for each in names:
                copies = {id(named[name]): named[name] for name in each if name in named}
                if len(copies) > 1:
                    raise ValueError(
                        f"{' and '.join(name for name in each if name in named)} are tied "
                        "and on one rank, but are two parameters; let the layers share one"
                    )
                if not copies or self.group is None:
                    continue
                ranks = [
                    orders.rank_of[_stage_of(int(name.split(".")[0]), boundaries)] for name in each
                ]
                tie = TiedParameter(next(iter(copies.values())), list(dict.fromkeys(ranks)))
                if hasattr(tie.parameter, "main_grad"):
                    raise ValueError(
                        f"{each[0]} is tied and has a main_grad, which is not summed "
                        "over ranks; drop that"
                    )
                self.ties.append(tie)
        self.ties = [tie for tie in self.ties if len(tie.holders) > 1]
        self.elsewhere = {id(tie.parameter) for tie in self.ties if tie.holders[0] != self.rank}
        self._before: list[Tensor | None] = []

    def close(self) -> None:
        """Let go of the group."""
        self.group, self.ties = None, []

    def make_equal(self) -> None:
        """Give every copy the values of the first.

        Raises:
            PeerError: For a rank that is lost.
        """
        for parameter, holders in self.ties:
            if parameter.is_meta:
                continue
            values = parameter.detach()
            if holders[0] == self.rank:
                self._finish([self._send(values, peer) for peer in holders[1:]])
            else:
                arriving = self._receive(values, holders[0])
                self._finish([arriving])
                values.copy_(arriving[1])

    def begin(self) -> None:
        """Put what `.grad` holds of earlier steps aside: other ranks have it already."""
        self._before = []
        for parameter, _ in self.ties:
            gradient = parameter.grad
            self._before.append(None if gradient is None else gradient.clone())
            if gradient is not None:
                gradient.zero_()

    def sum(self, *, failed: bool) -> None:
        """Let every copy have the sum of all copies' gradients.

        Args:
            failed: The step did on this rank; then it only tells the others, whose sums are of no
                use either.

        Raises:
            PeerError: For a rank that is lost.
        """
        if not self.ties:
            return
        peers = sorted({peer for _, holders in self.ties for peer in holders if peer != self.rank})
        has_grad = torch.tensor(
            [not failed and parameter.grad is not None for parameter, _ in self.ties],
            dtype=torch.uint8,
            device="cpu",
        )
        has: dict[int, list[bool]] = {self.rank: has_grad.bool().tolist()}
        arriving = {}
        for peer in peers:
            common = [i for i, (_, holders) in enumerate(self.ties) if peer in holders]
            arriving[peer] = self._receive(has_grad[common], peer), common
        self._finish([self._send(has_grad[common], peer) for peer, (_, common) in arriving.items()])
        for peer, (flags, common) in arriving.items():
            self._finish([flags])
            has[peer] = [False] * len(self.ties)
            for i, flag in zip(common, flags[1].tolist(), strict=True):
                has[peer][i] = bool(flag)
        for i, (tie, before) in enumerate(zip(self.ties, self._before, strict=True)):
            self._sum(tie, {rank: has[rank][i] for rank in tie.holders}, before)
        self._before = []

    @torch.no_grad()
    def _sum(self, tie: TiedParameter, has: Mapping[int, bool], before: Tensor | None) -> None:
        parameter, holders = tie
        if not any(has.values()):
            if before is not None and parameter.grad is not None:
                parameter.grad.add_(before)
            return
        others = [peer for peer in holders if peer != self.rank]
        arriving = {peer: self._receive(parameter.detach(), peer) for peer in others if has[peer]}
        own = parameter.grad if has[self.rank] else None
        leaving = [] if own is None else [self._send(own, peer) for peer in others]
        self._finish([*arriving.values(), *leaving])
        total: Tensor | None = None
        for rank in holders:  # in this order on every rank: sums have the same bits
            if has[rank]:
                part = own if rank == self.rank else arriving[rank][1].to(parameter.device)
                assert part is not None
                total = part.clone() if total is None else total.add_(part)
        assert total is not None
        if before is not None:
            total.add_(before)
        if parameter.grad is None:
            parameter.grad = total.to(parameter.dtype)
        else:
            parameter.grad.copy_(total)  # in place: .grad may be a view of a bucket

    def _send(self, tensor: Tensor, peer: int) -> tuple[Any, Tensor, int]:
        tensor = tensor.detach().cpu().contiguous()
        return self._exchange("send", tensor, peer)

    def _receive(self, like: Tensor, peer: int) -> tuple[Any, Tensor, int]:
        return self._exchange("recv", torch.empty(like.shape, dtype=like.dtype, device="cpu"), peer)

    def _exchange(self, what: str, tensor: Tensor, peer: int) -> tuple[Any, Tensor, int]:
        try:
            return getattr(self.group, what)([tensor], peer, self.tag), tensor, peer
        except RuntimeError as error:
            raise PeerError(peer, error) from error

    def _finish(self, several: Sequence[tuple[Any, Tensor, int]]) -> None:
        for work, _, peer in several:
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerError(peer, error) from error


def _stage_of(layer: int, boundaries: Sequence[int]) -> int:
    return next(
        stage for stage, (a, b) in enumerate(itertools.pairwise(boundaries)) if a <= layer < b
    )


def _merged(several: Iterable[Sequence[str]], order: Sequence[str]) -> list[Names]:
    """Groups that have a name in common as one, names in the order of the model."""
    group_of: dict[str, set[str]] = {}
    for names in several:
        whole = set(names).union(*(group_of.get(name, ()) for name in names))
        for name in whole:
            group_of[name] = whole
    place = {name: i for i, name in enumerate(order)}
    groups = {
        id(group): tuple(sorted(group, key=lambda name: place[name])) for group in group_of.values()
    }
    return sorted(groups.values(), key=lambda names: place[names[0]])


def _check_alike(names: Names, parameters: Mapping[str, Tensor]) -> None:
    """ValueError for tied parameters that can't be one."""
    first = parameters[names[0]]
    for name in names[1:]:
        other = parameters[name]
        if (other.shape, other.dtype, other.requires_grad) != (
            first.shape,
            first.dtype,
            first.requires_grad,
        ):
            raise ValueError(
                f"{names[0]} and {name} are tied, but one is {tuple(first.shape)} {first.dtype}, "
                f"the other {tuple(other.shape)} {other.dtype}, or one of them is frozen; they "
                "must be alike"
            )
