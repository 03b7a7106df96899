"""AxisGroups: the process groups of data, tensor and pipeline parallelism, of a mesh or one by
one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pyops.comm.agreement import agree
from pyops.mesh import ALONE, Mesh, ProcessGroupLike, resolve

__all__ = ["AxisGroups"]

AXES = ("dp", "tp", "pp")


@dataclass(frozen=True)
class AxisGroups:
    """The groups that this rank is in."""

    dp: ProcessGroupLike
    """The ranks that hold the same parameters and see other data: other rows, or other tokens of
    the same rows (cp)."""

    tp: dist.ProcessGroup | None
    """The ranks that share each parameter; None: it is whole."""

    pp: dist.ProcessGroup | None
    """The ranks that hold other layers; None: this rank holds all."""

    mesh: Mesh | DeviceMesh | None = None
    """That they are of; None: groups were given one by one."""

    @contextmanager
    def all_agree(self) -> Iterator[None]:
        """All ranks of all axes leave the block, or all raise. Within it only the ranks of one axis
        may communicate, which then agree by themselves. Collective."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        given = [group for group in (self.tp, self.pp) if group is not None]
        for group in (*given, self.dp):
            try:
                agree(error, group=group)
            except Exception as caught:
                error = caught
        if error is not None:
            raise error

    @classmethod
    def of(
        cls, mesh: Any, *, group: Any = None, tp_group: Any = None, pp_group: Any = None
    ) -> AxisGroups:
        """The groups of a mesh, or those given.

        Raises:
            ValueError: a mesh and a group are given, or the mesh has ranks along another axis.
            TypeError: an argument is no mesh, or no group.
        """
        given = {"group": group, "tp_group": tp_group, "pp_group": pp_group}
        if mesh is None:
            resolve(group, "ZeroOptimizer")
            for name in ("tp_group", "pp_group"):
                if not isinstance(given[name], dist.ProcessGroup | None):
                    raise TypeError(
                        f"ZeroOptimizer: {name} is {given[name]!r}; give a torch process group, or "
                        "None"
                    )
            return cls(group, tp_group, pp_group)
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"ZeroOptimizer: mesh and {name} are both given; leave {name} out, for the "
                    "mesh has it"
                )
        if isinstance(mesh, Mesh):
            if mesh.device_mesh is None:
                return cls(ALONE, None, None, mesh)
            tp, pp = (mesh.group(axis) if mesh.size(axis) > 1 else None for axis in ("tp", "pp"))
            return cls(mesh.group(("dp", "cp")), tp, pp, mesh)
        if isinstance(mesh, DeviceMesh):
            return cls._of_device_mesh(mesh)
        raise TypeError(
            f"ZeroOptimizer: mesh is {mesh!r}; give a pyops.mesh.Mesh or a torch DeviceMesh"
        )

    @classmethod
    def _of_device_mesh(cls, mesh: DeviceMesh) -> AxisGroups:
        names = mesh.mesh_dim_names
        if names is None:
            if mesh.ndim != 1:
                raise ValueError(
                    f"ZeroOptimizer: mesh has {mesh.ndim} dimensions without names; give it "
                    f"mesh_dim_names, of {', '.join(AXES)}"
                )
            return cls(mesh.get_group(), None, None)
        for name in names:
            if name not in AXES and mesh[name].size() > 1:
                raise ValueError(
                    f"ZeroOptimizer: mesh has {mesh[name].size()} ranks along {name!r}; take the "
                    f"part of it whose dimensions are of {', '.join(AXES)}, such as mesh['dp']"
                )
        dp, tp, pp = (
            mesh.get_group(name) if name in names and mesh[name].size() > 1 else None
            for name in AXES
        )
        return cls(ALONE if dp is None else dp, tp, pp, mesh)
