"""What a placement says of the axes over which its gradient is summed is not passed over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from pyops.comm.buckets.reduce_axes import axis_sizes, check_reduce_axes
from pyops.data_parallel import DataParallel
from pyops.flat import Placement
from pyops.mesh import ALONE, Axes, Mesh
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer

pytestmark = pytest.mark.cpu_only


def _model(*axes: str) -> nn.Module:
    layer = nn.Linear(2, 2)
    whole = Placement.whole((2, 2), rank=0, ranks=1)
    layer.placements = {"weight": replace(whole, reduce=axes)}  # type: ignore[assignment]
    return nn.Sequential(layer)


def test_axes_of_one_rank_make_no_difference() -> None:
    assert axis_sizes(Mesh(Axes())) == {"pp": 1, "dp": 1, "cp": 1, "tp": 1}
    for sizes in ({"dp": 2, "cp": 1}, {"dp": 2}, {"dp": 2, "cp": 1, "edp": 1}):
        check_reduce_axes(_model("dp"), sizes, who="this")
    check_reduce_axes(_model("cp", "dp"), None, who="this")
    check_reduce_axes(_model(), {"dp": 1, "tp": 2}, who="this")
    for axes, sizes in (
        (("dp",), {"dp": 2, "cp": 2}),
        ((), {"dp": 2}),
        (("edp",), {"dp": 2, "edp": 2}),
    ):
        with pytest.raises(ValueError, match=r"this: the gradient of 0\.weight is summed over"):
            check_reduce_axes(_model(*axes), sizes, who="this")


def test_a_group_alone_does_not_say_which_axes_it_is_of() -> None:
    with pytest.raises(
        ValueError, match=r"of 0\.weight is summed over the axes \('dp',\), .* mesh="
    ):
        DataParallel(_model("dp"), group=ALONE)
    with pytest.raises(ValueError, match=r"ZeroOptimizer: the gradient of 0\.weight"):
        ZeroOptimizer(_model("dp"), AdamW, ZeroConfig(1), group=ALONE)
    mesh = Mesh(Axes())
    DataParallel(_model("dp"), mesh=mesh).close()
    ZeroOptimizer(_model("dp"), AdamW, ZeroConfig(1), mesh=mesh)


def _over_ranks(rank: int, group: object) -> list[str]:
    mesh = Mesh(Axes(dp=2))
    found = []
    for make in (
        lambda: DataParallel(_model("edp"), mesh=mesh),
        lambda: ZeroOptimizer(_model(), AdamW, ZeroConfig(1), mesh=mesh),
    ):
        with pytest.raises(ValueError) as caught:
            make()
        found.append(str(caught.value))
    model = DataParallel(_model("dp"), mesh=mesh)
    model(torch.ones(1, 2)).sum().backward()
    return found


def test_all_ranks_refuse(world) -> None:
    for data, zero in world(2).run(_over_ranks):
        assert "summed over the axes ('edp',), and DataParallel sums over ('dp', 'cp')" in data
        assert "summed over the axes (), and ZeroOptimizer sums over" in zero
