"""Over which ranks gradients are summed: what each parameter's placement says of the axes of a
mesh.

    Placement.reduce       mesh dp 2 x cp 2              summed over
    ("dp", "cp")           the same parameter on all     all four: the data-parallel ranks
    ("dp",)                another one on each cp rank   the two of this rank's column
    ()                     another one on each rank      none: whole where it is computed
    ("dp",), cp = 1        the same parameter on all     both: axes of one rank make no difference

A mean is one over all data-parallel ranks, whichever of them a gradient is summed over: losses are
means over the tokens of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pyops.comm.collectives.communicator import Communicator
from pyops.flat import Placement
from pyops.mesh import ALONE, Mesh, ProcessGroupLike, resolve
from pyops.protocols import RankGrid

__all__ = ["DATA_AXES", "OwnRanks", "axis_sizes", "check_grids_apart", "own_ranks"]

DATA_AXES = ("dp", "cp")  # whose ranks hold the same parameters and see other tokens


@dataclass(frozen=True)
class OwnRanks:
    """The ranks that hold a parameter and sum its gradient, where these are some of the
    data-parallel ranks only."""

    axes: tuple[str, ...]
    """Of the mesh, along which they lie."""
    group: ProcessGroupLike
    """Their group."""
    share: float
    """How many they are, over the number of all data-parallel ranks: makes their mean a part of the
    mean over all."""

    @property
    def communicator(self) -> Communicator | None:
        """Of their group; None for this rank alone."""
        return None if resolve(self.group, "OwnRanks") is None else Communicator.of(self.group)

    def __str__(self) -> str:
        return f"summed over {' and '.join(self.axes) or 'no axis'}"


def axis_sizes(mesh: Mesh | DeviceMesh | None) -> dict[str, int] | None:
    """{axis: its ranks} of a mesh; None where groups were given one by one.

    Args:
        mesh: What a strategy was given.
    """
    if isinstance(mesh, Mesh):
        return mesh.axes.degrees()
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or ()
    return {name: mesh[name].size() for name in names}


def own_ranks(model: nn.Module, mesh: Mesh | DeviceMesh | None, *, who: str) -> dict[int, OwnRanks]:
    """{id: its ranks} of the parameters whose gradients are summed over some of the data and
    context parallel ranks; all others are summed over all of them.

    Args:
        model: Its modules' placements say over which axes each gradient is summed.
        mesh: Has the axes; None where a strategy was given groups one by one.
        who: The strategy, for the error.

    Raises:
        ValueError: Naming the parameter and its axes, where the mesh does not say which ranks these
            are, or they are none of data and context parallelism.
    """
    sizes, parameters = axis_sizes(mesh), dict(model.named_parameters())
    found: dict[int, OwnRanks] = {}
    for name, place in Placement.of(model).items():
        if set(place.reduce) == set(DATA_AXES):
            continue
        what = f"{who}: the gradient of {name} is summed over the axes {place.reduce}, and"
        if sizes is None:
            raise ValueError(
                f"{what} which ranks these are is not known of a group; give mesh= in its place"
            )
        wide, everyone = (
            tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
            for axes in (place.reduce, DATA_AXES)
        )
        if set(wide) == set(everyone):
            continue
        strange = [a for a in place.reduce if a not in DATA_AXES and (a in wide or a not in sizes)]
        if strange:
            raise ValueError(
                f"{what} {who} sums over {DATA_AXES}, or some of these. Leave it out of the "
                "module that is given, and sum its gradient over mesh.group(...) of its axes"
            )
        found[id(parameters[name])] = OwnRanks(
            wide, _group(mesh, wide), _ranks(sizes, wide) / _ranks(sizes, everyone)
        )
    return found


def check_grids_apart(model: nn.Module, group: ProcessGroupLike, *, who: str) -> None:
    """Refuse data parallelism over ranks of one grid, such as the layers of a 2.5d grid: these have
    copies of the weights, but their products sum the gradients over them already.

    Args:
        model: Perhaps with layers of pyops.tensor_parallel.grids.
        group: The data-parallel ranks.
        who: The strategy, for the error.

    Raises:
        ValueError: Naming the ranks of the group that are on one grid.
    """
    ranks = resolve(group, who)
    if ranks is None:
        return
    for name, module in model.named_modules():
        grid = getattr(module, "grid", None)
        if not isinstance(grid, RankGrid) or grid.ranks.size == 1:
            continue
        on_grid = resolve(grid.ranks.group, who)
        if on_grid is None:  # ranks that are threads of one process
            continue
        members = set(dist.get_process_group_ranks(ranks))
        both = sorted(members & set(dist.get_process_group_ranks(on_grid)))
        if len(both) > 1:
            raise ValueError(
                f"{who}: ranks {both} of the group are on one grid, that of {name or 'the model'} "
                f"({grid.mode}, {' x '.join(map(str, grid.shape))}), which sums its "
                "gradients itself; give the ranks that have the same place on other grids, or "
                "pyops.mesh.ALONE where there are none"
            )


def _ranks(sizes: Mapping[str, int], axes: tuple[str, ...]) -> int:
    return prod(sizes[axis] for axis in axes)


def _group(mesh: Mesh | DeviceMesh | None, axes: tuple[str, ...]) -> ProcessGroupLike:
    if not axes or mesh is None:
        return ALONE
    return mesh.group(axes) if isinstance(mesh, Mesh) else mesh.get_group(axes[0])
