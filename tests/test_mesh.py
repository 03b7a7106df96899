"""The mesh: degrees are checked, and each axis has the right ranks in its group."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pyops.mesh import ALONE, Alone, Axes, Mesh, axis_group, resolve

pytestmark = pytest.mark.cpu_only


def _lines(rank: int, group: dist.ProcessGroup) -> dict[str, tuple[int, int, list[int]]]:
    mesh = Mesh(Axes(dp=2, tp=2))
    found = {}
    for axis in ("pp", "dp", "cp", "tp"):
        line = mesh.group(axis)
        assert line is not None
        found[axis] = (mesh.rank(axis), mesh.size(axis), dist.get_process_group_ranks(line))
    return found


def test_groups_of_a_2_by_2_grid(world):
    ranks = world(4).run(_lines)
    assert [r["dp"] for r in ranks] == [
        (0, 2, [0, 2]),
        (0, 2, [1, 3]),
        (1, 2, [0, 2]),
        (1, 2, [1, 3]),
    ]
    assert [r["tp"] for r in ranks] == [
        (0, 2, [0, 1]),
        (1, 2, [0, 1]),
        (0, 2, [2, 3]),
        (1, 2, [2, 3]),
    ]
    assert [r["pp"] for r in ranks] == [(0, 1, [rank]) for rank in range(4)]


def _refused(rank: int, group: dist.ProcessGroup) -> str:
    with pytest.raises(ValueError) as caught:
        Mesh(Axes(dp=3))
    return str(caught.value)


def test_a_product_other_than_the_number_of_ranks_is_refused_on_all(world):
    messages = world(2).run(_refused)
    assert "pp 1 x dp 3 x cp 1 x tp 1 = 3 ranks, but 2 run; start 3" in messages[0]
    assert messages[0] == messages[1]


def test_one_rank_needs_no_torch_distributed():
    mesh = Mesh(Axes())
    assert (mesh.group("dp"), mesh.rank("dp"), mesh.size("dp")) == (None, 0, 1)
    with pytest.raises(ValueError, match="no axis 'data'; there are pp, dp, cp, tp"):
        mesh.size("data")


def _several(rank: int, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = []
    for axes, names in (
        (Axes(dp=2, cp=2), ("cp", "dp")),  # all ranks
        (Axes(dp=2, tp=2), ("dp", "cp")),  # one axis of several ranks
        (Axes(pp=2, tp=2), ("dp", "cp")),  # this rank alone
        (Axes(pp=2, cp=2), ("dp", "tp", "cp")),
    ):
        mesh = Mesh(axes)
        line = mesh.group(names)
        members = dist.get_process_group_ranks(line)
        assert members.index(rank) == mesh.rank(names) == dist.get_rank(line)
        assert mesh.size(names) == len(members)
        found.append(members)
    mesh = Mesh(Axes(dp=2, tp=2))
    same = mesh.group(("dp", "cp")) is mesh.group("dp")
    return [*found, same, mesh.group(("dp", "tp")) is dist.group.WORLD]


def test_groups_over_several_axes(world):
    found = world(4).run(_several)
    assert [each[0] for each in found] == [[0, 1, 2, 3]] * 4
    assert [each[1] for each in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [each[2] for each in found] == [[rank] for rank in range(4)]
    assert [each[3] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each[4:] for each in found] == [[True, True]] * 4


def test_axes_that_are_not_neighbors_are_numbered_with_the_last_running_fastest():
    axes = Axes(pp=2, dp=2, tp=2)
    assert axes.lines(("tp", "pp")) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert axes.lines(("pp", "dp")) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert axes.lines(("dp",)) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert axes.lines(("cp",)) == [[rank] for rank in range(8)]


def _asked(rank: int, group: dist.ProcessGroup) -> str:
    mesh = Mesh(Axes(dp=2, tp=2))
    with pytest.raises(ValueError) as caught:
        mesh._made(("pp", "tp") if rank else ("pp", "dp"))
    return str(caught.value)


def test_ranks_that_ask_for_other_axes_all_raise(world):
    for text in world(4).run(_asked):
        assert "rank 0 asks for the axes ('pp', 'dp'), rank 1 for ('pp', 'tp')" in text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "give one or more of pp, dp, cp, tp, each once"),
        (("dp", "dp"), r"axes \('dp', 'dp'\)"),
        (("dp", "ep"), "no axis 'ep'"),
    ],
)
def test_axes_that_can_not_be_are_refused(names, words):
    mesh = Mesh(Axes())
    assert (mesh.group(("dp", "cp")), mesh.rank(("dp", "cp")), mesh.size(("dp", "cp"))) == (
        None,
        0,
        1,
    )
    with pytest.raises(ValueError, match=words):
        mesh.group(names)


@pytest.mark.parametrize("degree", [0, -1, True, 2.0])
def test_degrees_are_positive_integers(degree):
    with pytest.raises(ValueError, match=r"dp is .*; an axis has 1 rank or more"):
        Axes(dp=degree)


def test_alone_stays_the_one_value():
    assert repr(ALONE) == "pyops.mesh.ALONE"
    assert Alone() is ALONE
    assert copy.copy(ALONE) is ALONE
    assert copy.deepcopy({"group": ALONE})["group"] is ALONE
    assert pickle.loads(pickle.dumps(ALONE)) is ALONE


def test_one_process_has_no_group(monkeypatch):
    assert resolve(None, "this") is None
    assert resolve(ALONE, "this") is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resolve(ALONE, "this") is None
    with pytest.raises(ValueError, match=r"^this: .*WORLD_SIZE=2"):
        resolve(None, "this")


@pytest.mark.parametrize("group", [0, "cpu", dist.GroupMember.NON_GROUP_MEMBER])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(TypeError, match=f"this: group is {group!r}"):
        resolve(group, "this")


def _resolved(rank: int, group: dist.ProcessGroup) -> list[bool]:
    pair = Mesh(Axes(dp=2)).group("dp")
    return [
        resolve(None, "this") is dist.group.WORLD,
        resolve(pair, "this") is pair,
        resolve(ALONE, "this") is None,
    ]


def test_a_group_among_ranks(world):
    assert world(2).run(_resolved) == [[True] * 3] * 2


def _axis_groups(rank: int, group: dist.ProcessGroup) -> list[bool]:
    mesh = Mesh(Axes(dp=2, tp=2))
    of_torch = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unnamed = init_device_mesh("cpu", (4,))
    refusals = []
    for given, ranks, words in (
        (mesh, ALONE, "Some: mesh and group"),
        ("dp", None, "mesh is 'dp'"),
        (unnamed, None, "dimensions of mesh are None; name one 'dp'"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            axis_group("Some", "dp", group=ranks, mesh=given)  # type: ignore[arg-type]
        refusals.append(True)
    return [
        axis_group("Some", "dp", group=None, mesh=mesh) is mesh.group("dp"),
        axis_group("Some", "dp", group=None, mesh=of_torch) is of_torch.get_group("dp"),
        axis_group("Some", "dp", group=group, mesh=None) is group,
        *refusals,
    ]


def test_the_group_of_an_axis(world):
    assert world(4).run(_axis_groups) == [[True] * 6] * 4


def test_a_mesh_of_one_process_means_alone():
    assert axis_group("Some", "pp", group=None, mesh=Mesh(Axes())) is ALONE
