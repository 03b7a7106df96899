"""What a placement says of the axes over which its gradient is summed is not passed over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from pyops.comm.buckets.reduce_axes import axis_sizes, own_ranks
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
    alone = Mesh(Axes())
    assert axis_sizes(alone) == {"pp": 1, "dp": 1, "cp": 1, "tp": 1}
    for axes in (("dp",), (), ("cp", "dp"), ("edp",)):
        assert own_ranks(_model(*axes), alone, who="this") == {}
    assert own_ranks(_model("cp", "dp"), None, who="this") == {}


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


def _over_ranks(rank: int, group: object) -> tuple[list[str], dict[tuple[str, ...], Any]]:
    mesh = Mesh(Axes(dp=2, tp=2))
    messages = []
    for make in (
        lambda: DataParallel(_model("edp"), mesh=mesh),
        lambda: ZeroOptimizer(_model("dp", "tp"), AdamW, ZeroConfig(1), mesh=mesh),
    ):
        with pytest.raises(ValueError) as caught:
            make()
        messages.append(str(caught.value))
    found: dict[tuple[str, ...], Any] = {}
    for names in (("dp",), ("dp", "cp"), ("cp",), ()):
        for own in own_ranks(_model(*names), mesh, who="this").values():
            over = own.communicator
            found[names] = own.axes, own.share, 1 if over is None else over.size
    return messages, found


def test_axes_that_are_none_of_data_parallelism_are_refused_on_all_ranks(world: Any) -> None:
    for (data, zero), found in world(4).run(_over_ranks):
        assert "summed over the axes ('edp',), and DataParallel sums over ('dp', 'cp')" in data
        assert "summed over the axes ('dp', 'tp'), and ZeroOptimizer sums over" in zero
        assert found == {("cp",): ((), 0.5, 1), (): ((), 0.5, 1)}
