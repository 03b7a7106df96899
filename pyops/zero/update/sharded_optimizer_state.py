"""What this rank steps: its piece of every parameter, given to an ordinary optimizer as parameters
of their own.

    parameter w [512, 512]   | rank 0: 0 .. 98303 | rank 1: 98304 .. 196607 | rank 2: .. 262143 |
    on rank 1, the optimizer steps a flat parameter of 98304 elements, keeps its states, and knows
    nothing of the rest

Each piece has its own state and its own count of steps, so a parameter that got no gradient
anywhere is left alone, as it would be in one process. 16-bit parameters have float32 masters:
pyops' optimizers keep them as a state of the 16-bit piece; for any other optimizer the piece itself
is the master, and is rounded into the parameter after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.buckets.grad_norm import sum_of_squares
from pyops.comm.collectives.communicator import Communicator
from pyops.flat import Placement
from pyops.offload import Offloaded
from pyops.offload.optimizer import stays_with
from pyops.optim.adafactor.parts import TensorPart
from pyops.optim.fused.fused_optimizer import FusedOptimizer
from pyops.optim.fused.layerwise import LayerwiseOptimizer
from pyops.protocols import ParamGroup
from pyops.zero.config import ZeroConfig
from pyops.zero.hooks.sharded_gradients import ShardedGradients
from pyops.zero.layout.parameter_file import in_memory, in_turn
from pyops.zero.layout.parameters import FlatParameters
from pyops.zero.layout.partition import Piece
from pyops.zero.layout.shard_range import ShardRange
from pyops.zero.optimizer_factory import OptimizerFactory

__all__ = ["ParamShard", "ShardedOptimizerState", "StateLoaders"]

StateLoaders = Mapping[
    str, Callable[[], Any]
]  # a piece's states by name, each taken when it is called
AHEAD = "ahead"  # the result of a delayed step, in the state
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass
class ParamShard:
    """A piece and the parameter that the inner optimizer steps.

    Attributes:
        tensor: The piece of the model.
        result: What a step makes of it, the same tensor or, where updates are delayed, one of its
            own.
        target: The result where the inner parameter is a master that is rounded into it.
        gradient: In the piece's dtype.
    """

    name: str
    shape: tuple[int, ...]
    flat: int
    piece: Piece
    tensor: Tensor
    result: Tensor
    parameter: nn.Parameter
    target: Tensor | None
    placement: Placement | None = None
    gradient: Tensor | None = None

    @property
    def shard_range(self) -> ShardRange:
        return ShardRange(
            self.shape, self.piece.of_tensor.start, self.piece.of_tensor.stop, self.placement
        )


class ShardedOptimizerState:
    """The shards of this rank, and the optimizer over them.

    Args:
        flats: The flat parameters, of which each rank has a shard.
        groups: The user's param groups, each with `params`.
        factory: What makes the optimizer over the shards, with a group for each of the user's.
        arguments: Its arguments.
        config: offload and tile_bytes; bucket_bytes is also the limit of gradients that are there
            in float32 at a time, for master weights that need them so.
        placements: Of the parameters that a tensor-parallel group shares, by name.
        delayed: A step leaves the model as it is, until `publish`.

    Attributes:
        optimizer: The inner optimizer.
        pieces: pieces[g] are those of group g, in the order of its parameters.
    """

    def __init__(
        self,
        flats: Sequence[FlatParameters],
        groups: Sequence[ParamGroup],
        factory: OptimizerFactory,
        arguments: ParamGroup,
        *,
        config: ZeroConfig,
        placements: Mapping[str, Placement] = MappingProxyType({}),
        delayed: bool = False,
    ) -> None:
        offload = config.offload_target
        arguments, optimizer_class = dict(arguments), factory.optimizer_class
        fused = issubclass(optimizer_class, FusedOptimizer)
        if fused and not arguments.get("stochastic_rounding", False):
            arguments.setdefault("master_weights", True)
        # What sums over all parts of a tensor takes part in the sums also where it has none of it.
        self._in_parts = hasattr(optimizer_class, "reduce_sums")
        self._by_layers = self._in_parts or issubclass(optimizer_class, LayerwiseOptimizer)
        self.flats, self._placements, self._delayed, self._portion_bytes = (
            list(flats),
            placements,
            delayed,
            config.bucket_bytes,
        )
        self._elsewhere = (
            offload is not None and not stays_with(offload, self.flats[0].device)
            if self.flats
            else False
        )
        where = {
            id(flat.parameters[piece.index]): (f, piece)
            for f, flat in enumerate(self.flats)
            for piece in flat.partition.pieces(flat.rank)
        }
        self.pieces: list[list[ParamShard]] = []
        inner: list[ParamGroup] = []
        first = 0
        for group in groups:
            mine: list[ParamShard] = []
            offsets: list[int] = []
            for parameter in group["params"]:
                f, piece = where[id(parameter)]
                if piece.numel or self._by_layers:
                    mine.append(self._own(f, piece, fused=fused))
                    if self._in_parts:
                        part = TensorPart(mine[-1].shape, piece.of_tensor.start)
                        mine[-1].parameter.part_of = part  # type: ignore[attr-defined]
                    offsets.append(first + piece.of_tensor.start)
                first += parameter.numel()
            self.pieces.append(mine)
            options = {key: value for key, value in group.items() if key != "params"}
            inner.append({**options, "params": [each.parameter for each in mine]})
            if fused:
                inner[-1]["offsets"] = (
                    offsets  # so that random rounding draws what one process would
                )
        self.optimizer = self._over(inner, factory, arguments)
        self.offloaded: Offloaded | None = None
        if offload is not None and self.all_pieces():
            targets = {
                each.parameter: each.target for each in self.all_pieces() if each.target is not None
            }
            self.offloaded = Offloaded(
                self.optimizer, offload, targets=targets, tile_bytes=config.tile_bytes
            )

    def _over(
        self,
        groups: Sequence[ParamGroup],
        factory: OptimizerFactory,
        arguments: ParamGroup,
    ) -> torch.optim.Optimizer:
        """The optimizer over the groups. It is made of stand-ins, for parameters that are in a file
        have no memory."""
        kinds = {
            id(p): nn.Parameter(torch.zeros(1, dtype=p.dtype, device=p.device))
            for g in groups
            for p in g["params"]
            if p.numel() and not p.untyped_storage().nbytes()
        }
        made = [{**g, "params": [kinds.get(id(p), p) for p in g["params"]]} for g in groups]
        optimizer = factory.make(made, arguments)
        for group, given in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = given["params"]
        return optimizer

    def _own(self, f: int, piece: Piece, *, fused: bool) -> ParamShard:
        flat = self.flats[f]
        name, shape = flat.names[piece.index], flat.partition.layout.shapes[piece.index]
        tensor = flat.piece(piece)
        result = tensor.clone() if self._delayed else tensor
        placement = self._placements.get(name)
        if fused or flat.dtype not in SIXTEEN_BITS:
            return ParamShard(
                name, shape, f, piece, tensor, result, nn.Parameter(result), None, placement
            )
        region = getattr(flat, "region", None)
        if (
            self._elsewhere and tensor.numel() > 1 and region is None
        ):  # the offload makes a master of the target
            master = tensor.new_zeros(1, dtype=torch.float32).expand(tensor.shape)
            return ParamShard(
                name, shape, f, piece, tensor, result, nn.Parameter(master), result, placement
            )
        with in_memory([] if region is None else [region]):
            return ParamShard(
                name,
                shape,
                f,
                piece,
                tensor,
                result,
                nn.Parameter(tensor.float()),
                result,
                placement,
            )

    def all_pieces(self) -> list[ParamShard]:
        return [each for group in self.pieces for each in group]

    # ----------------------------------------------------------------------------------------------
    # stepping

    def take_gradients(self, gradients: ShardedGradients, absent: set[tuple[int, int]]) -> None:
        """Give every piece its gradient; None to those of `absent`, pairs of a flat's number and a
        parameter's."""
        for each in self.all_pieces():
            chunk = gradients.of_flat[each.flat][each.piece.bucket].chunk
            gone = chunk is None or (each.flat, each.piece.index) in absent
            each.gradient = None if gone or chunk is None else chunk[each.piece.of_chunk]

    def squared_norm(self, device: torch.device, everyone: Communicator | None) -> Tensor:
        """float64 [2]: of the gradients given, the sum of squares and the number that are not
        finite; over all data-parallel ranks they add up to those of the whole gradients.

        Of what several ranks of a tensor-parallel group hold alike, the first measures.

        Args:
            everyone: The data-parallel ranks; where several have a gradient whole, each gives its
                part of the sum.
        """
        copies: dict[int, list[Tensor]] = {}
        for each in self.all_pieces():
            first = each.placement is None or each.placement.first
            if each.gradient is not None and each.piece.numel and first:
                _, ranks = self.flats[each.flat].copy(everyone)
                copies.setdefault(ranks, []).append(each.gradient)
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for ranks, gradients in copies.items():
            total += sum_of_squares(gradients, device=device) / ranks
        return total

    def prepare(self, outer: Sequence[ParamGroup]) -> None:
        """Take up the hyper-parameters of `outer` for the next step."""
        for theirs, mine in zip(outer, self.optimizer.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    @property
    def takes_found_inf(self) -> bool:
        """Whether `step` can be given a flag on the device that says whether it changes nothing."""
        return isinstance(self.optimizer, FusedOptimizer) and self.offloaded is None

    @torch.no_grad()
    def step(self, *, factor: Tensor | None, found_inf: Tensor | None = None) -> None:
        """Step with the gradients times `factor`, and let go of them.

        Args:
            factor: A scalar on the gradients' device; None for 1.
            found_inf: A scalar there, not 0 where the step is to change nothing; only where
                `takes_found_inf`.
        """
        fused = self.optimizer if isinstance(self.optimizer, FusedOptimizer) else None
        if fused is not None:
            # The factor is applied inside the launch that steps. These are the attributes by which
            # torch's GradScaler speaks to an optimizer.
            fused.grad_scale = None if factor is None else factor.double().reciprocal()  # type: ignore[attr-defined]
            fused.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            self._step(None if fused is not None else factor)
        finally:
            if fused is not None:
                fused.grad_scale = fused.found_inf = None  # type: ignore[attr-defined]
            for each in self.all_pieces():
                each.parameter.grad = each.gradient = None

    def _step(self, factor: Tensor | None) -> None:
        if self.offloaded is not None and self._elsewhere:
            for some in self._turns(lambda each: each.gradient is not None):
                given = {
                    each.parameter: each.gradient for each in some if each.gradient is not None
                }
                self.offloaded.step(gradients=given, factor=factor)
            return
        if any(each.target is not None for each in self.all_pieces()):
            for portion in self._portions():
                self._step_some(portion, factor)
            return
        for each in self.all_pieces():
            each.parameter.grad = None if each.gradient is None else _scaled(each.gradient, factor)
        self.optimizer.step()

    def _portions(self) -> list[list[ParamShard]]:
        """The pieces with gradients, of which float32 copies are made, some at a time."""
        found: list[list[ParamShard]] = []
        filled = self._portion_bytes
        for each in self.all_pieces():
            if each.gradient is None:
                continue
            nbytes = each.gradient.numel() * each.parameter.element_size()
            if filled + nbytes > self._portion_bytes:
                found.append([])
                filled = 0
            found[-1].append(each)
            filled += nbytes
        return found

    def _step_some(self, portion: Sequence[ParamShard], factor: Tensor | None) -> None:
        whole = self.optimizer.param_groups
        chosen = {each.parameter for each in portion}
        for each in portion:
            assert each.gradient is not None
            each.parameter.grad = _scaled(each.gradient.to(each.parameter.dtype), factor)
        self.optimizer.param_groups = [
            {**group, "params": [p for p in group["params"] if p in chosen]} for group in whole
        ]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = whole
        for each in portion:
            each.parameter.grad = None
            if each.target is not None:
                each.target.copy_(each.parameter)

    def _turns(
        self, chosen: Callable[[ParamShard], bool] = lambda each: True
    ) -> Iterator[list[ParamShard]]:
        """The pieces that are chosen, in lists whose parameters are in memory together; what
        becomes of those is kept."""
        of_flat: dict[int, list[ParamShard]] = {}
        for each in self.all_pieces():
            if chosen(each):
                of_flat.setdefault(each.flat, []).append(each)
        regions = {f: getattr(self.flats[f], "region", None) for f in of_flat}
        if here := [each for f, some in of_flat.items() if regions[f] is None for each in some]:
            yield here
        stored = [(region, of_flat[f]) for f, region in regions.items() if region is not None]
        for number in in_turn([region for region, _ in stored], changed=True):
            yield stored[number][1]

    @torch.no_grad()
    def publish(self) -> None:
        """Put the results of a delayed step into the model."""
        for each in self.all_pieces():
            if each.result is not each.tensor:
                each.tensor.copy_(each.result)

    def states_of(self, each: ParamShard) -> ParamGroup:
        """A piece's states by name, its master among them where there is one, those in use, or to
        be read from where they are; {} before the first step."""
        if self.offloaded is not None:
            found = self.offloaded.look(each.parameter)
        else:
            found = dict(self.optimizer.state.get(each.parameter, {}))
            found |= {} if each.target is None else {"master": each.parameter.detach()}
        return found | {AHEAD: each.result} if found and each.result is not each.tensor else found

    # ----------------------------------------------------------------------------------------------
    # loading

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Set every master to its parameter, and forget the results of a delayed step."""
        for each in self.all_pieces():
            if each.result is not each.tensor:
                each.result.copy_(each.tensor)
        if self.offloaded is not None:
            for each in chain.from_iterable(self._turns()):
                if each.target is not None:
                    self.offloaded.write(each.parameter, {"master": each.target.float()})
                elif "master" in self.offloaded.look(each.parameter):
                    states = self.offloaded.read(each.parameter)
                    self.offloaded.write(
                        each.parameter, states | {"master": each.parameter.float()}
                    )
            return
        for each in self.all_pieces():
            if each.target is not None:
                each.parameter.copy_(each.target)
        if isinstance(self.optimizer, FusedOptimizer):
            self.optimizer.refresh_masters()

    @torch.no_grad()
    def load(self, coming: Sequence[StateLoaders], outer: Sequence[ParamGroup]) -> None:
        """Take up the states of each piece, in the order of `all_pieces`; options from `outer`.

        With offload one piece's are in memory at a time. "ahead" is the result of a delayed step.
        """
        for each in self.all_pieces():
            if each.result is not each.tensor:
                each.result.copy_(each.tensor)
        self._load(
            [{key: take for key, take in of_piece.items() if key != AHEAD} for of_piece in coming],
            outer,
        )
        ahead = {
            id(each): found[AHEAD]
            for each, found in zip(self.all_pieces(), coming, strict=True)
            if AHEAD in found
        }
        for each in chain.from_iterable(self._turns(lambda each: id(each) in ahead)):
            each.result.copy_(ahead[id(each)]())

    def _load(self, coming: Sequence[StateLoaders], outer: Sequence[ParamGroup]) -> None:
        if self.offloaded is not None:
            for theirs, own in zip(outer, self.optimizer.param_groups, strict=True):
                own.update({key: value for key, value in theirs.items() if key != "params"})
            given = {
                id(each): of_piece for each, of_piece in zip(self.all_pieces(), coming, strict=True)
            }
            for each in chain.from_iterable(self._turns(lambda each: bool(given[id(each)]))):
                self.offloaded.write(
                    each.parameter, {key: take() for key, take in given[id(each)].items()}
                )
            return
        states = {
            number: {key: take() for key, take in of_piece.items()}
            for number, of_piece in enumerate(coming)
            if of_piece
        }
        masters = {
            number: states[number].pop("master")
            for number, each in enumerate(self.all_pieces())
            if each.target is not None and "master" in states.get(number, {})
        }
        groups, first = [], 0
        for theirs, mine in zip(outer, self.pieces, strict=True):
            options = {key: value for key, value in theirs.items() if key != "params"}
            groups.append({**options, "params": list(range(first, first + len(mine)))})
            first += len(mine)
        states = {number: found for number, found in states.items() if found}
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        for number, each in enumerate(self.all_pieces()):
            if each.target is not None:
                each.parameter.copy_(masters.get(number, each.target))


def _scaled(gradient: Tensor, factor: Tensor | None) -> Tensor:
    """The gradient times the factor, in place."""
    if factor is None:
        return gradient
    return gradient.mul_(
        factor.to(
            gradient.device, gradient.dtype if gradient.dtype == torch.float64 else torch.float32
        )
    )
