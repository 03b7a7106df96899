"""Names for the axes of a grid of ranks, and the only place where process groups are made.

    Axes(dp=2, tp=2)         tp ->            group("tp") of rank 2 is ranks 2, 3
                       dp    0   1            group("dp") of rank 2 is ranks 0, 2
                        v    2   3

Axes from the outside in: pp (pipeline), dp (data), cp (context), tp (tensor). The innermost axis
talks most, so its ranks are neighbours, on one host where possible (Narayanan et al., 2021, section
3.2).

Several axes are one group as well: group(("dp", "cp")) has the ranks that hold the same parameters
and see other tokens, over which gradients are summed. Its ranks are numbered with the last axis
running fastest, so that sums in rank order are the same on every run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pyops.failure import naming_lost_ranks
from pyops.launchers import started_together

__all__ = [
    "ALONE",
    "Alone",
    "Axes",
    "Mesh",
    "ProcessGroupLike",
    "alone",
    "axis_group",
    "check_initialized",
    "resolve",
]

_alone: ContextVar[bool] = ContextVar("alone", default=False)


class Alone:
    """The type of `ALONE`, its one instance: copies and unpickled ones are that instance again."""

    _instance: Alone | None = None

    def __new__(cls) -> Alone:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __reduce__(self) -> str:
        return "ALONE"

    def __repr__(self) -> str:
        return "pyops.mesh.ALONE"


ALONE = Alone()
"""Given as a group: this process alone, whatever torch.distributed runs beside it."""

ProcessGroupLike: TypeAlias = dist.ProcessGroup | Alone | None
"""What a parameter `group` takes: a process group; None for the default group, or one process where
torch.distributed is not initialized; `ALONE` for this process alone."""


def resolve(group: ProcessGroupLike, what: str) -> dist.ProcessGroup | None:
    """The process group that an argument `group` means.

    Args:
        group: a process group, None for the default group, or `ALONE`.
        what: the class or function that was given it, for the error.

    Returns:
        The group; None for one process: `ALONE`, or None where torch.distributed is not
        initialized. Pass the argument on as it came, not this result: to the next function None
        would be the default group again.

    Raises:
        ValueError: group is None and this process was started as one rank of several that have not
            called init_process_group (see `check_initialized`).
        TypeError: group is something else.
    """
    if isinstance(group, Alone):
        return None
    if group is None:
        check_initialized(what)
        return dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{what}: group is {group!r}; pass a torch process group that this rank belongs to, "
            "None for the default group, or pyops.mesh.ALONE for this process alone"
        )
    return group


@contextmanager
def alone() -> Iterator[None]:
    """Within, a process that torchrun started as one of several may work without the others, before
    it has joined them: count the parameters of a model, say."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def check_initialized(who: str, group: ProcessGroupLike = None) -> None:
    """ValueError where `who`, given this group, would work alone although this process was started
    as one rank of several.

    Every strategy calls it first: group=None is one process where torch.distributed is not
    initialised, and ranks that train each for itself look well until somebody compares them, or
    until both save into one folder.
    """
    if torch.compiler.is_compiling() or group is not None or dist.is_initialized():
        return
    name, size = started_together(os.environ)
    if size > 1 and not _alone.get():
        raise ValueError(
            f"{who}: torch.distributed is not initialised, but the environment has "
            f"{name}={size}, so this is one of {size} "
            "ranks, each of which would work alone; call "
            "torch.distributed.init_process_group() or pyops.launch.join() first, or, where this "
            f"process is meant to be alone, start it without {name} in its environment, or "
            "use pyops.mesh.alone()"
        )


@dataclass(frozen=True)
class Axes:
    """How many ranks each axis has; 1 for an axis that is not used.

    Attributes:
        pp: Pipeline parallelism: ranks that hold other layers.
        dp: Data parallelism: ranks that hold the same parameters and see other data.
        cp: Context parallelism: ranks that hold other tokens of the same sequences.
        tp: Tensor parallelism: ranks that share each layer.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name, degree in self.degrees().items():
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise ValueError(f"{name} is {degree!r}; an axis has 1 rank or more")

    def degrees(self) -> dict[str, int]:
        """Axis name -> degree, outermost first."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def size(self) -> int:
        """Number of ranks that the axes take together."""
        return prod(self.degrees().values())

    def lines(self, names: Sequence[str]) -> list[list[int]]:
        """The ranks of each group over some axes: those that differ along these alone.

        Args:
            names: Of axes; the last one in the order of the mesh runs fastest within a group.
        """
        degrees = self.degrees()
        known = list(degrees)
        chosen = sorted(known.index(name) for name in names)
        others = [i for i in range(len(known)) if i not in chosen]
        grid = torch.arange(self.size, device="cpu").view(*degrees.values())
        length = prod(degrees[known[i]] for i in chosen)
        found: list[list[int]] = grid.permute(*others, *chosen).reshape(-1, length).tolist()
        return found


class Mesh:
    """A grid of all ranks, with a process group for every line of ranks along an axis.

    Args:
        axes: The degrees; their product must be the number of ranks.
        device_type: "cpu" or "cuda". Works without torch.distributed as well, for one rank: then
            every group is None.

    Raises:
        ValueError: For degrees whose product is another number than that of the ranks, and where
            torchrun started several that have not called init_process_group.
    """

    def __init__(self, axes: Axes, *, device_type: str = "cpu") -> None:
        check_initialized("Mesh")
        world = dist.get_world_size() if dist.is_initialized() else 1
        if axes.size != world:
            product = " x ".join(f"{name} {degree}" for name, degree in axes.degrees().items())
            raise ValueError(
                f"{product} = {axes.size} ranks, but {world} run; start {axes.size} with "
                "torchrun --nproc-per-node, "
                "or change a degree"
            )
        self.axes = axes
        self.device_mesh: DeviceMesh | None = None
        self._several: dict[tuple[str, ...], dist.ProcessGroup] = {}
        if dist.is_initialized():
            degrees = axes.degrees()
            with naming_lost_ranks("the making of the groups of a Mesh"):
                self.device_mesh = init_device_mesh(
                    device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)
                )

    def group(self, axis: str | Sequence[str]) -> dist.ProcessGroup | None:
        """The group of ranks that differ from this one in `axis` alone, or in several axes; None
        where one rank runs alone.

        Args:
            axis: A name, or several. The first call for several axes of more than one rank each is
                a collective of all ranks: every rank must make it.

        Raises:
            ValueError: There is no such axis, or ranks ask for other axes at the same time.
        """
        names = self._named(axis)
        if self.device_mesh is None:
            return None
        wide = tuple(name for name in names if self.size(name) > 1)
        if len(wide) < 2:  # the group of the one axis, so that no second one has the same ranks
            return self.device_mesh.get_group(wide[0] if wide else names[0])
        if self.size(wide) == self.axes.size:
            whole: dist.ProcessGroup | None = dist.group.WORLD
            return whole
        if wide not in self._several:
            self._several[wide] = self._made(wide)
        return self._several[wide]

    def rank(self, axis: str | Sequence[str]) -> int:
        """This rank's coordinate along `axis`, or its number in the group of several axes."""
        found = 0
        for name in self._named(axis):
            here = self.device_mesh.get_local_rank(name) if self.device_mesh is not None else 0
            found = found * self.size(name) + here
        return found

    def size(self, axis: str | Sequence[str]) -> int:
        """The degree of `axis`, or the product of several."""
        return prod(self.axes.degrees()[name] for name in self._named(axis))

    def _made(self, names: tuple[str, ...]) -> dist.ProcessGroup:
        """The group over several axes, made on all ranks in the same order."""
        with naming_lost_ranks(f"the making of the group of {' and '.join(names)} of a Mesh"):
            asked: list[Any] = [None] * self.axes.size
            dist.all_gather_object(asked, names)
            other = next((rank for rank, each in enumerate(asked) if each != asked[0]), None)
            if other is not None:
                raise ValueError(
                    f"Mesh.group: rank 0 asks for the axes {asked[0]}, rank {other} for "
                    f"{asked[other]}; the first call for several axes is made by all ranks "
                    "together, with the same axes"
                )
            found: dist.ProcessGroup | None = None
            for line in self.axes.lines(names):
                made = dist.new_group(line)
                if dist.get_rank() in line:
                    found = made
        assert found is not None
        return found

    def _named(self, axis: str | Sequence[str]) -> tuple[str, ...]:
        """The axes in the order of the mesh."""
        names, known = (axis,) if isinstance(axis, str) else tuple(axis), self.axes.degrees()
        for name in names:
            if name not in known:
                raise ValueError(f"no axis {name!r}; there are {', '.join(known)}")
        if not names or len(set(names)) < len(names):
            raise ValueError(f"axes {names}: give one or more of {', '.join(known)}, each once")
        return tuple(name for name in known if name in names)


def axis_group(
    what: str,
    axis: str | Sequence[str],
    *,
    group: ProcessGroupLike,
    mesh: Mesh | DeviceMesh | None,
) -> ProcessGroupLike:
    """The group that the two arguments `group` and `mesh` of a class name together.

    Args:
        what: The class that was given them, for the error.
        axis: The axis of the mesh along which its ranks lie, such as "dp", or several. Of a torch
            DeviceMesh the first must be there, and the others of one rank.
        group: What a parameter `group` takes.
        mesh: A mesh that has the axis, or None.

    Returns:
        The group as it came where there is no mesh; else the mesh's, ALONE where that is one
        process.

    Raises:
        TypeError: The mesh is something else.
        ValueError: Both are given, or the mesh has no such axis.
    """
    if mesh is None:
        return group
    first, *others = (axis,) if isinstance(axis, str) else tuple(axis)
    if not isinstance(mesh, Mesh | DeviceMesh):
        raise TypeError(
            f"{what}: mesh is {mesh!r}; pass a pyops.mesh.Mesh, or a torch DeviceMesh with a "
            f"dimension {first!r}"
        )
    if group is not None:
        raise ValueError(
            f"{what}: mesh and group are both given; leave group out, for the mesh has it"
        )
    if isinstance(mesh, Mesh):
        return mesh.group(axis) or ALONE
    names = mesh.mesh_dim_names or ()
    if first not in names:
        raise ValueError(
            f"{what}: the dimensions of mesh are {mesh.mesh_dim_names}; name one {first!r}, or "
            "give group"
        )
    for name in others:
        if name in names and mesh[name].size() > 1:
            raise ValueError(
                f"{what}: mesh has {mesh[name].size()} ranks along {name!r}, which sum gradients "
                f"with those of {first!r}; give a pyops.mesh.Mesh, or group="
            )
    return mesh.get_group(first)
