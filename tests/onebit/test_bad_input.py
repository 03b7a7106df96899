"""Arguments of the one-bit optimizers that make no sense: refused with the value and the fix,
before there is an optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops.comm.compression.one_bit import OneBit
from pyops.optim import OneBitAdam, OneBitLAMB
from tests.onebit.runs import built

pytestmark = pytest.mark.on_device

BOTH: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({"warmup_steps": w}, ValueError, "warmup_steps=.* at least 1")
        for w in (0, -1, 2.5, True, None, "later", [1], math.nan)
    ),
    *(
        ({"total_steps": t}, ValueError, "total_steps=.* must be the run's")
        for t in ("x", 0, -1, 2.5, True, [1], math.inf)
    ),
    *(
        ({"frozen_beta2": b}, TypeError, "frozen_beta2=.* must be a number")
        for b in ("a", [0.9], True)
    ),
    *(
        ({"frozen_beta2": b}, ValueError, r"frozen_beta2=.* must be in \[0, 1\)")
        for b in (1.0, 2.0, -0.1, math.nan)
    ),
    *(
        ({"precondition": p}, TypeError, "precondition=.* must be True or False")
        for p in ("yes", 1)
    ),
    ({"reduction": "max"}, ValueError, "reduction='max'"),
    ({"compat": "DeepSpeed"}, ValueError, "compat='DeepSpeed'"),
    ({"codec": OneBit}, TypeError, "codec=.*OneBit.* must be a codec"),
    ({"codec": "onebit"}, TypeError, "codec='onebit' must be a codec"),
    ({"model": nn.Linear(2, 2)}, TypeError, "model is a Linear"),
    ({"max_grad_norm": "1"}, TypeError, "max_grad_norm='1'"),
    ({"zero_grad": "no"}, TypeError, "zero_grad='no'"),
]
LAMBS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"min_coeff": 2.0, "max_coeff": 1.0}, ValueError, "min_coeff=2.0 and max_coeff=1.0"),
    ({"min_coeff": -1.0}, ValueError, "min_coeff=-1.0"),
    ({"max_coeff": "x"}, TypeError, "max_coeff='x' must be a number"),
    ({"factor_min": 2.0}, ValueError, "factor_min=2.0"),
    ({"factor_max": 0.5}, ValueError, "factor_min=0.5 and factor_max=0.5"),
    ({"factor_min": None}, TypeError, "factor_min=None must be a number"),
    ({"coeff_beta": 1.0}, ValueError, "coeff_beta=1.0"),
    ({"coeff_beta": "x"}, TypeError, "coeff_beta='x' must be a number"),
    ({"factor_threshold": -0.1}, ValueError, "factor_threshold=-0.1"),
]


@pytest.mark.parametrize(
    ("make", "options", "error", "says"),
    [
        *((make, *case) for make in (OneBitAdam, OneBitLAMB) for case in BOTH),
        *((OneBitLAMB, *case) for case in LAMBS),
    ],
    ids=lambda v: getattr(v, "__name__", None) or str(v)[:40],
)
def test_arguments(make, options, error, says):
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(error, match=f"{make.__name__}: {says}"):
        built(make, [weight], **{"warmup_steps": 2, **options})
    assert weight.grad is None


def _one_rank_is_wrong(rank: int, group: dist.ProcessGroup) -> None:
    for options, error, says in (
        ({"total_steps": 0}, ValueError, "total_steps=0"),
        ({"frozen_beta2": "a"}, TypeError, "='a'"),
    ):
        with pytest.raises(error, match=says):
            built(
                OneBitAdam,
                [nn.Parameter(torch.ones(3))],
                warmup_steps=2,
                group=group,
                **(options if rank == 2 else {}),
            )
    weight = nn.Parameter(torch.ones(3))
    optimizer = built(OneBitAdam, [weight], warmup_steps=2, group=group, total_steps=10)
    weight.grad = torch.ones(3)
    optimizer.step()


def test_the_mistake_of_one_rank_is_raised_on_all(world):
    world(3).run(_one_rank_is_wrong)
