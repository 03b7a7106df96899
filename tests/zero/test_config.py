"""ZeroConfig and the ways to give ZeroOptimizer an inner optimizer and its groups."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pyops.comm import Int8, OneBit
from pyops.config import Config
from pyops.mesh import ALONE, Axes, Mesh
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.zero.models import Net, mean_loss, part

pytestmark = pytest.mark.cpu_only

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stage": True}, "stage is True"),
    ({"stage": 4}, "stage is 4"),
    ({"offload": None}, "offload is None"),
    ({"offload": "gpu"}, "offload is 'gpu'"),
    ({"tile_bytes": 0}, "tile_bytes is 0"),
    ({"bucket_bytes": 2.5}, "bucket_bytes is 2.5"),
    ({"whole_below": -1}, "whole_below is -1"),
    ({"max_grad_norm": 0}, "max_grad_norm is 0"),
    ({"reduction": "max"}, "reduction is 'max'"),
    ({"overlap_grad_reduce": "forward"}, "overlap_grad_reduce is 'forward'"),
    ({"overlap_param_gather": 1}, "overlap_param_gather is 1"),
    (
        {"overlap_param_gather": True, "overlap_grad_reduce": False},
        "overlap_param_gather is True, but overlap_grad_reduce is False",
    ),
    ({"delayed_update": True}, "delayed_update is True, but offload is 'none'"),
    ({"stage": 2, "gather_codec": Int8()}, "gather_codec has no meaning at stage 2"),
    ({"stage": 2, "reduce_codec": OneBit()}, "reduce_codec is OneBit"),
    ({"stage": 3, "secondary_group": 2}, "secondary_group is 2"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_wrong_value_is_named_by_the_optimizer_and_by_a_run(
    options: dict[str, Any], words: str
) -> None:
    config = ZeroConfig(**options)
    with pytest.raises((TypeError, ValueError)) as raised:
        ZeroOptimizer(nn.Linear(2, 2), AdamW, config, lr=1e-3)
    assert str(raised.value).startswith(f"ZeroOptimizer: {words}")
    with pytest.raises((TypeError, ValueError)) as raised:
        Config(zero=config)
    assert str(raised.value).startswith(f"zero.{words}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stage": 2}, ["stage=2", "ZeroConfig(stage=...)"]),
        ({"op": "sum"}, ["op='sum'", "ZeroConfig(reduction=...)"]),
        ({"overlap": "forward"}, ["overlap='forward'", "overlap_param_gather=True"]),
        ({"initialise": print}, ["initialise=", "ZeroConfig(initialize=...)"]),
        ({"max_grad_norm": 1.0}, ["max_grad_norm=1.0", "ZeroConfig(max_grad_norm=...)"]),
        ({"config": ZeroConfig(1)}, ["config", "zero="]),
    ],
)
def test_an_option_that_is_given_as_before_is_refused_with_its_new_place(
    arguments: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(TypeError) as raised:
        ZeroOptimizer(nn.Linear(2, 2), AdamW, lr=1e-3, **arguments)
    assert all(each in str(raised.value) for each in words)


def _trained(optimizer: Any, dtype: torch.dtype = torch.float32, **arguments: Any) -> list[Tensor]:
    model = Net(mixed=False).to(dtype)
    zero = ZeroOptimizer(model, optimizer, ZeroConfig(stage=1, max_grad_norm=1.0), **arguments)
    for step in range(3):
        x, y = part(step, 0, 1)
        mean_loss(model, x.to(dtype), y.to(dtype)).backward()
        zero.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", [AdamW, torch.optim.AdamW], ids=["pyops", "torch"])
def test_a_class_a_partial_and_a_function_take_the_same_steps(cls: Any, dtype: Any) -> None:
    expected = _trained(cls, dtype, lr=1e-2, weight_decay=0.1)
    before = list(Net(mixed=False).to(dtype).parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, expected, strict=True))
    for optimizer, arguments in (
        (partial(cls, lr=1e-2, weight_decay=0.1), {}),
        (partial(cls, lr=1.0, weight_decay=0.1), {"lr": 1e-2}),
        (lambda params: cls(params, lr=1e-2, weight_decay=0.1), {}),
        (lambda params, lr: cls(params, lr=lr, weight_decay=0.1), {"lr": 1e-2}),
    ):
        found = _trained(optimizer, dtype, **arguments)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("optimizer", "error", "words"),
    [
        (lambda params: 3, TypeError, "gives a int"),
        (7, TypeError, "optimizer is 7"),
        (partial(AdamW, max_grad_norm=1.0), ValueError, "max_grad_norm=1.0"),
        (partial(AdamW, lr=-1.0), ValueError, "lr"),
        (lambda params: torch.optim.LBFGS(params), ValueError, "LBFGS"),
    ],
)
def test_what_makes_no_optimizer_of_shards_is_refused(
    optimizer: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ZeroOptimizer(nn.Linear(2, 2), optimizer, ZeroConfig(1))


def _steps(rank: int, size: int, **groups: Any) -> list[Tensor]:
    model = Net(mixed=False)
    zero = ZeroOptimizer(model, torch.optim.SGD, ZeroConfig(stage=2), lr=0.1, **groups)
    mean_loss(model, *part(0, rank, size)).backward()
    zero.step()
    return [p.detach().clone() for p in model.parameters()]


def _by_mesh(rank: int, group: Any) -> list[bool]:
    """Whether a mesh means its groups, and ALONE this process."""
    expected = _steps(rank, 2, group=group)
    alone = _steps(rank, 2, group=ALONE)
    meshes = (
        Mesh(Axes(dp=2)),
        Mesh(Axes(cp=2)),
        init_device_mesh("cpu", (2,)),
        init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")),
    )
    same = [
        all(torch.equal(a, b) for a, b in zip(_steps(rank, 2, mesh=mesh), expected, strict=True))
        for mesh in meshes
    ]
    differs = any(not torch.equal(a, b) for a, b in zip(alone, expected, strict=True))
    model = nn.Linear(2, 2)
    found = []
    for groups in (
        {"mesh": meshes[0], "group": group},
        {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))},
        {"mesh": 3},
        {"tp_group": 3},
    ):
        try:
            ZeroOptimizer(model, AdamW, ZeroConfig(2), **groups)
        except (TypeError, ValueError) as error:
            found.append(str(error))
    words = ("group are both given", "2 ranks along 'cp'", "mesh is 3", "tp_group is 3")
    said = [word in text for word, text in zip(words, found, strict=True)]
    return [*same, differs, *said]


def test_a_mesh_stands_for_its_groups(world) -> None:
    assert all(all(each) for each in world(2).run(_by_mesh))


def test_a_closed_optimizer_says_so() -> None:
    zero = ZeroOptimizer(nn.Linear(2, 2), AdamW, ZeroConfig(1))
    assert not zero.closed
    zero.close()
    assert zero.closed
    with pytest.raises(RuntimeError, match="is closed"):
        zero.step()
