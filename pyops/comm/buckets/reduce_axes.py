"""Over which axes of a mesh gradients are summed: what each parameter's placement says, beside
what a strategy does.

    Placement.reduce       mesh dp 2 x cp 2              summed over
    ("dp", "cp")           the same parameter on all     all four: what strategies do
    ("dp",)                another one on each cp rank   two: refused, for its sum would be wrong
    ("dp",), cp = 1        the same parameter on all     both: axes of one rank make no difference
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pyops.flat import Placement
from pyops.mesh import Mesh

__all__ = ["axis_sizes", "check_reduce_axes"]

DATA_AXES = ("dp", "cp")  # whose ranks hold the same parameters and see other tokens


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


def check_reduce_axes(model: nn.Module, sizes: Mapping[str, int] | None, *, who: str) -> None:
    """Refuse parameters whose gradients are not summed over data and context parallel ranks.

    Args:
        model: Its modules' placements say over which axes each gradient is summed.
        sizes: See `axis_sizes`.
        who: The strategy, for the error.

    Raises:
        ValueError: Naming the parameter, its axes, and those of the strategy.
    """
    for name, place in Placement.of(model).items():
        if set(place.reduce) == set(DATA_AXES):
            continue
        if sizes is None:
            raise ValueError(
                f"{who}: the gradient of {name} is summed over the axes {place.reduce}, and which "
                "ranks these are is not known of a group; give mesh= in its place"
            )
        wide, own = (
            {axis for axis in axes if sizes.get(axis, 1) > 1} for axes in (place.reduce, DATA_AXES)
        )
        if wide != own:
            raise ValueError(
                f"{who}: the gradient of {name} is summed over the axes {place.reduce}, and {who} "
                f"sums over {DATA_AXES}: other ranks hold other values of it. Leave it out of the "
                "module that is given, and sum its gradient over mesh.group(...) of its axes"
            )
