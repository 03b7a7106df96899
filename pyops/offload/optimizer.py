"""Offloaded: an optimizer whose states are in host memory or in a file, and which is stepped tile
by tile.

    optimizer = AdamW(parameters, ...)               any that steps each element by itself, of pyops
                                                     or torch
    offloaded = Offloaded(optimizer, "/fast/disk")
    loss.backward(); offloaded.step()                in place of optimizer.step()

For each tile the optimizer stands before slices of its parameters, whose states are views of the
tile, and takes an ordinary step; it is given nothing of the rest. Rajbhandari et al.,
ZeRO-Infinity, arXiv:2104.07857, section 5.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyops.offload.later import Later, Place
from pyops.offload.rehearsal import STATES_OF_ITS_OWN, rehearse, standing_in
from pyops.offload.stores import DiskStore, HostStore, Store
from pyops.offload.tiles import Segment, Tile, plan_tiles
from pyops.offload.traffic import Far, Loaded, Near
from pyops.ops.memory import memory_problem, require_memory

__all__ = ["Offloaded", "stays_with"]

MASTER = "master"
Entry = dict[str, Any]


class Offloaded:
    """Steps `optimizer` with its states in `where`.

    nbytes: of all states. resident_bytes: of host memory that is used for them. close() gives both
    back.

    Args:
        optimizer: Over contiguous parameters of one device. What it has in `state` already is taken
            over, and its `state` is then empty. param_groups stay as they are and may change from
            step to step: lr, say.
        where: "cpu" (host memory; pinned when parameters are on CUDA) or a folder on the disk to
            use.
        tile_bytes: States stepped at a time; a folder takes three tiles of memory. The result does
            not depend on it.
        targets: For some parameters in float32, a 16-bit (say) tensor of the same shape: the
            parameter's values (or the target's, where the parameter is one element, expanded)
            become a state, named "master", its memory is given back, and the target is the rounded
            values after every step.

    Raises:
        TypeError: For an optimizer that does not step each element by itself.
        ValueError: For parameters that are not contiguous or on several devices, for max_grad_norm
            (a tile does not know the norm of the rest: clip before the step).
        OSError: Naming the file, where the disk has no room, now, or fails, in a step; a step that
            failed may have stepped a part of the tiles.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        where: str,
        *,
        tile_bytes: int = 32 << 20,
        targets: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self.optimizer, self.where = optimizer, where
        self.parameters: list[nn.Parameter] = [
            p for g in optimizer.param_groups for p in g["params"]
        ]
        self._group_of = [
            g for g, group in enumerate(optimizer.param_groups) for _ in group["params"]
        ]
        self._number = {id(p): i for i, p in enumerate(self.parameters)}
        self._targets = [None if targets is None else targets.get(p) for p in self.parameters]
        device = self._check()
        known: dict[tuple[int, torch.dtype], dict[str, torch.dtype]] = {}
        wanted = []
        for g, parameter, target in zip(
            self._group_of, self.parameters, self._targets, strict=True
        ):
            key = (g, parameter.dtype)
            if key not in known:
                known[key] = rehearse(optimizer, optimizer.param_groups[g], parameter.dtype)
            wanted.append(
                (
                    parameter.numel(),
                    known[key] | ({} if target is None else {MASTER: parameter.dtype}),
                )
            )
        self.tiles: list[Tile] = plan_tiles(wanted, tile_bytes=tile_bytes)
        self._places: list[list[tuple[int, Segment]]] = [[] for _ in self.parameters]
        for number, tile in enumerate(self.tiles):
            for segment in tile.segments:
                self._places[segment.parameter].append((number, segment))
        self._once: dict[
            tuple[int, int], Entry
        ] = {}  # what a segment has besides tensors of its length, by its beginning
        self._written: set[int] = set()  # tiles whose regions hold something
        cuda = device.type == "cuda"
        self._stays = stays_with(where, device)
        self._store: Store = (
            HostStore([] if self._stays else self.tiles, pin_memory=cuda)
            if where == "cpu"
            else DiskStore(self.tiles, where, pin_memory=cuda)
        )
        self.nbytes = sum(tile.nbytes for tile in self.tiles)
        self.resident_bytes = self.nbytes if self._stays else self._store.resident_bytes
        self._traffic = (
            Far(self.parameters, self._targets, device)
            if cuda
            else Near(self.parameters, self._targets)
        )
        if not self._stays:
            self._take_over()

    def _check(self) -> torch.device:
        """The parameters' device; ValueError for what can't be offloaded."""
        who = type(self.optimizer).__name__
        if getattr(self.optimizer, "max_grad_norm", None) is not None:
            raise ValueError(
                f"{who} clips by the norm of all gradients, which a tile does not know; "
                "clip before the step"
            )
        for i, (parameter, target) in enumerate(zip(self.parameters, self._targets, strict=True)):
            what = f"parameter {i} of {who}, of shape {tuple(parameter.shape)}"
            expanded = target is not None and _is_expanded(parameter)
            if not (parameter.is_contiguous() or expanded) or (
                target is not None and not target.is_contiguous()
            ):
                raise ValueError(
                    f"{what}, has strides {parameter.stride()}; expected a contiguous "
                    "one, and its target too"
                )
            if target is not None and (
                target.shape != parameter.shape or not parameter.is_floating_point()
            ):
                raise ValueError(
                    f"the target of {what}, has shape {tuple(target.shape)}; expected "
                    "the parameter's"
                )
            source = (
                target if expanded else parameter
            )  # of the first values; a target may be in a file until its step
            if (
                target is not None
                and source is not None
                and (problem := memory_problem(source)) is not None
            ):
                raise ValueError(f"{'the target of ' if expanded else ''}{what}, {problem}")
        devices = {
            p.device if t is None else t.device
            for p, t in zip(self.parameters, self._targets, strict=True)
        }
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            raise ValueError(
                f"{who} steps parameters on {sorted(map(str, devices))}; offload needs "
                "one device, cpu or cuda"
            )
        return devices.pop()

    @torch.no_grad()
    def _take_over(self) -> None:
        """Put what there is into the store: states the optimizer has, values of parameters with a
        target."""
        for number, region in self._store.visit(
            self._tiles_with(self._targets), fresh=set(range(len(self.tiles)))
        ):
            for segment in self.tiles[number].segments:
                if MASTER in segment.fields and self._targets[segment.parameter] is not None:
                    whole: Any = self.parameters[segment.parameter].detach()
                    whole = self._targets[segment.parameter] if _is_expanded(whole) else whole
                    values = whole.view(-1)[segment.start : segment.stop]
                    segment.fields[MASTER].view(region, segment.numel).copy_(values)
            self._written.add(number)
        for parameter in self.parameters:
            if state := self.optimizer.state.pop(parameter, None):
                self._put(parameter, state)
        for parameter, target in zip(self.parameters, self._targets, strict=True):
            if target is not None:
                parameter.data = parameter.new_zeros(1).expand(
                    parameter.shape
                )  # it keeps its shape, for the gradient

    def _tiles_with(self, chosen: list[Any]) -> list[int]:
        """Numbers of the tiles that have a part of a parameter with something in `chosen`."""
        return [
            n
            for n, tile in enumerate(self.tiles)
            if any(chosen[s.parameter] is not None for s in tile.segments)
        ]

    # ----------------------------------------------------------------------------------------------
    # stepping

    @torch.no_grad()
    def step(
        self,
        *,
        gradients: Mapping[nn.Parameter, Tensor] | None = None,
        factor: Tensor | None = None,
    ) -> None:
        """One step of every parameter that has a gradient. Gradients are left as the optimizer
        leaves them.

        Args:
            gradients: By parameter, in any floating dtype, instead of those in `.grad`; not where
                states stay in place.
            factor: What gradients are multiplied by. The optimizer's hooks of steps run once per
                tile.
        """
        if factor is not None:
            require_memory(factor, "factor")
        found = (
            [p.grad for p in self.parameters]
            if gradients is None
            else [gradients.get(p) for p in self.parameters]
        )
        for number, target in enumerate(self._targets):
            if target is not None and found[number] is not None:
                require_memory(target, f"the target of parameter {number}")
        if self._stays:
            return self._step_in_place()
        self._traffic.gradients, self._factor = found, factor
        turns = self._tiles_with(found)
        fresh = {number for number in turns if number not in self._written}
        traffic, coming = self._traffic, None
        for turn, (number, region) in enumerate(self._store.visit(turns, fresh=fresh)):
            loaded = traffic.fetch(self.tiles[number].segments) if coming is None else coming
            coming = (
                traffic.fetch(self.tiles[turns[turn + 1]].segments)
                if turn + 1 < len(turns)
                else None
            )
            traffic.arrive(loaded)
            self._step_tile([each for each in loaded if each.gradient is not None], region)
            self._written.add(number)
        traffic.finish()
        traffic.gradients = []

    def _step_in_place(self) -> None:
        type(self.optimizer).step(self.optimizer)
        for parameter, target in zip(self.parameters, self._targets, strict=True):
            if target is not None:
                target.copy_(parameter)

    def _step_tile(self, loaded: list[Loaded], region: Tensor) -> None:
        groups = [
            {k: v for k, v in g.items() if k not in STATES_OF_ITS_OWN} | {"params": []}
            for g in self.optimizer.param_groups
        ]
        state: dict[nn.Parameter, Entry] = {}
        pieces: list[nn.Parameter] = []
        for each in loaded:
            segment = each.segment
            values = (
                segment.fields[MASTER].view(region, segment.numel)
                if each.parameter is None
                else each.parameter
            )
            piece = nn.Parameter(values)
            assert each.gradient is not None
            piece.grad = each.gradient.to(piece.dtype)
            if self._factor is not None:
                piece.grad = piece.grad * self._factor.to(
                    piece.grad.device, torch.promote_types(piece.dtype, torch.float32)
                )
            once = self._once.get((segment.parameter, segment.start))
            if once is not None:
                state[piece] = once | self._views(each, region)
            self._add(groups[self._group_of[segment.parameter]], segment, piece)
            pieces.append(piece)
        with standing_in(self.optimizer, groups, state):
            type(self.optimizer).step(self.optimizer)
            for each, piece in zip(loaded, pieces, strict=True):
                self._keep(each, region, self.optimizer.state.get(piece, {}))
                self._traffic.send(each, piece.detach())
                # the optimizer may remember the piece, and with it the memory that the gradient is
                # a part of
                piece.grad = None

    def _add(self, group: Entry, segment: Segment, piece: nn.Parameter) -> None:
        """Put a piece into a tile's group, with what the group has for each parameter."""
        group["params"].append(piece)
        whole = self.optimizer.param_groups[self._group_of[segment.parameter]]
        place = next(
            i for i, p in enumerate(whole["params"]) if p is self.parameters[segment.parameter]
        )
        if whole.get("offsets") is not None:
            group.setdefault("offsets", []).append(whole["offsets"][place] + segment.start)
        elif getattr(self.optimizer, "stochastic_rounding", False):
            before = sum(p.numel() for p in self.parameters[: segment.parameter])
            group.setdefault("offsets", []).append(before + segment.start)
        if whole.get("copies") is not None:
            copy = whole["copies"][place]
            group.setdefault("copies", []).append(
                None if copy is None else copy.view(-1)[segment.start : segment.stop]
            )

    @staticmethod
    def _views(each: Loaded, region: Tensor) -> Entry:
        own = {
            name: field
            for name, field in each.segment.fields.items()
            if each.parameter is not None or name != MASTER
        }
        return {name: field.view(region, each.segment.numel) for name, field in own.items()}

    def _keep(self, each: Loaded, region: Tensor, state: Entry) -> None:
        """What the step left in the state of a piece: into the region, where it is not there
        already."""
        segment, views = each.segment, self._views(each, region)
        if missing := sorted(set(views) - set(state)):
            raise RuntimeError(
                f"{type(self.optimizer).__name__} has no {missing} after a step, which "
                "it had in a rehearsal"
            )
        for name, view in views.items():
            if state[name].data_ptr() != view.data_ptr():
                view.copy_(state[name])
        first = (segment.parameter, segment.start) not in self._once
        # What is small and made together with large tensors would keep their memory from going back
        # to the system.
        once = {name: value for name, value in state.items() if name not in views}
        self._once[segment.parameter, segment.start] = _copies(once) if first else once

    # ----------------------------------------------------------------------------------------------
    # reading and writing

    @torch.no_grad()
    def read(self, parameter: nn.Parameter) -> Entry:
        """The parameter's states by name, those with an entry per element in its shape, in memory
        of their own; {} if none yet.

        With a target, "master" is among them, also before the first step.
        """
        found = self.look(parameter)
        return {
            name: value.read() for name, value in found.items() if isinstance(value, Later)
        } | _copies({name: value for name, value in found.items() if not isinstance(value, Later)})

    def look(self, parameter: nn.Parameter) -> Entry:
        """As `read`, but states in a store are `Later`s: not read until they are asked for; others
        are the states in use."""
        number = self._index(parameter)
        target = self._targets[number]
        if self._stays:
            found = dict(self.optimizer.state.get(parameter, {}))
            return found if target is None else found | {MASTER: parameter.detach()}
        out: Entry = {}
        places: dict[str, list[Place]] = {}
        for tile, segment in self._places[number]:
            once = self._once.get((number, segment.start))
            for name, field in segment.fields.items():
                if once is not None or (name == MASTER and target is not None):
                    places.setdefault(name, []).append(
                        Place(tile, field, segment.start, segment.stop)
                    )
            for name, value in (once or {}).items():
                out.setdefault(name, value)
        return out | {
            name: Later(self._store, parameter.shape, found) for name, found in places.items()
        }

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Take `state`, as `read` gives it, for the parameter's; with a "master", its target is
        that, rounded.

        A "master" alone leaves the other states as they are.

        Raises:
            ValueError: Before anything is written, where an entry is missing or has another shape.
        """
        number = self._index(parameter)
        target = self._targets[number]
        self._put(parameter, state)
        if target is not None and MASTER in state:
            target.copy_(state[MASTER])

    def _put(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        number = self._index(parameter)
        target = self._targets[number]
        shape = parameter.shape
        names = {name for _, segment in self._places[number] for name in segment.fields} - (
            {MASTER} if target is not None else set()
        )
        alone = target is not None and set(state) == {
            MASTER
        }  # of a parameter that has never been stepped, say
        for name in sorted({MASTER} if alone else names):
            if not isinstance(state.get(name), Tensor) or state[name].shape != shape:
                found = (
                    tuple(state[name].shape)
                    if isinstance(state.get(name), Tensor)
                    else state.get(name)
                )
                raise ValueError(
                    f"state {name!r} of parameter {number} is {found}; expected a tensor "
                    f"of shape {tuple(shape)}"
                )
            require_memory(state[name], f"state {name!r} of parameter {number}")
        if self._stays and alone:
            parameter.copy_(state[MASTER])
            return
        if self._stays:
            self.optimizer.state[parameter] = _copies(
                {k: v for k, v in state.items() if target is None or k != MASTER}
            )
            if target is not None and MASTER in state:
                parameter.copy_(state[MASTER])
            return
        for tile, segment in self._places[number]:
            for name, field in segment.fields.items():
                if name in state:
                    values = (
                        state[name]
                        .detach()
                        .view(-1)[segment.start : segment.stop]
                        .to("cpu", field.dtype)
                    )
                    self._store.write(tile, field.start, values)
            if alone:
                continue
            self._once[number, segment.start] = _copies(
                {k: v for k, v in state.items() if k not in segment.fields}
            )
            self._written.add(tile)

    def _index(self, parameter: nn.Parameter) -> int:
        if id(parameter) not in self._number:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is not one of the optimizer's"
            )
        return self._number[id(parameter)]

    def close(self) -> None:
        """Give memory and disk back; no step and no read is possible afterwards."""
        self._store.close()


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and tensor.untyped_storage().nbytes() == tensor.element_size()


def stays_with(where: str, device: torch.device) -> bool:
    """Whether the states are where they should be anyway."""
    return where == "cpu" and device.type == "cpu"


def _copies(entry: Mapping[str, Any]) -> Entry:
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in entry.items()
    }
