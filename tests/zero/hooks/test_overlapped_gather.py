"""Parameters that are gathered while the next forward computes: the same bits, waited for where
they are used."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from pyops.zero.layout.parameters import FlatParameters
from tests.grids import full
from tests.zero.models import Net, groups, mean_loss, part

pytestmark = pytest.mark.on_device


def _train(
    rank: int, group: Any, stage: int, overlap: bool | str, late: bool
) -> tuple[dict[str, Tensor], list[Any]]:
    """late: gathers take long. (the parameters; of each step how many gathers step() left behind,
    and what was read then)"""
    model = Net(seed=rank, mixed=False)
    zero = ZeroOptimizer(
        model,
        AdamW,
        ZeroConfig(
            stage=stage,
            overlap_grad_reduce=bool(overlap),
            overlap_param_gather=overlap == "forward",
            bucket_bytes=900,
            whole_below=40,
        ),
        group=group,
        params=groups(model),
        lr=1e-2,
    )
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        if late and zero.communicator is not None:
            gather, worker = FlatParameters.gather, zero.communicator.worker

            def slow(self: FlatParameters, *args: Any, **options: Any) -> Any:
                worker.submit(lambda: time.sleep(0.01) or torch.empty(0))
                return gather(self, *args, **options)

            patch.setattr(FlatParameters, "gather", slow)
        for step in range(5):
            x, y = part(step, rank, dist.get_world_size(group))
            mean_loss(model, x, y, sometimes=step % 2 == 0).backward()
            zero.step()
            seen.append([len(zero.arriving._works)])
            if step == 2:  # what looks at parameters before the next forward
                state = zero.model_state_dict() if stage == 3 else model.state_dict()
                seen[-1].append({k: v.clone() for k, v in state.items() if isinstance(v, Tensor)})
            elif step == 3:  # a block by itself
                with torch.no_grad():
                    seen[-1].append(model.blocks[2](torch.ones(2, 10)))
        with zero.whole_parameters():
            return {name: p.detach().clone() for name, p in model.named_parameters()}, seen


@pytest.mark.parametrize(("stage", "size"), [full(1, 2), (2, 3), (3, 2), (2, 1)])
def test_the_same_bits_at_every_place_where_they_are_read(world, stage: int, size: int):
    expected, before = world(size).run(_train, stage, True, False)[0]
    assert all(left == 0 for left, *_ in before)
    for found, seen in world(size).run(_train, stage, "forward", True):
        for name, p in expected.items():
            assert torch.equal(found[name], p), name
        for (left, *read), (_, *right) in zip(seen, before, strict=True):
            assert size == 1 or left > 1, "step() waited for the gathers"
            for a, b in zip(read, right, strict=True):
                pairs = [(a, b)] if isinstance(a, Tensor) else [(a[key], b[key]) for key in b]
                assert all(torch.equal(one, other) for one, other in pairs)


def _refused(rank: int, group: Any) -> str:
    try:
        ZeroOptimizer(
            Net(mixed=False),
            AdamW,
            ZeroConfig(stage=2, overlap_grad_reduce="backward"),
            group=group,
            lr=1e-2,
        )
    except TypeError as error:
        return str(error)
    return ""


def test_another_word_is_refused(world):
    assert all("overlap_grad_reduce is 'backward'" in said for said in world(2).run(_refused))
