"""Parameters that are moved, cast or replaced after Offloaded was made: it steps them as the
optimizer alone would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyops.offload import Offloaded
from pyops.optim import SGD, AdamW
from tests.grids import full
from tests.test_moved import HARMLESS, MOVES, network, x_of

pytestmark = pytest.mark.cpu_only


def _train(
    kind: Any, where: str | None, call: Any, options: dict[str, Any]
) -> tuple[list[float], list[torch.Tensor]]:
    model = network()
    optimizer: Any = kind(model.parameters(), lr=0.05, **options)
    stepped = optimizer if where is None else Offloaded(optimizer, where)
    losses = []
    for turn in range(4):
        if turn == 2:
            call(model)
        loss = model(x_of(model)).float().square().mean()
        loss.backward()
        stepped.step()
        model.zero_grad()
        losses.append(float(loss.detach()))
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "options"), [(AdamW, {"weight_decay": 0.1}), full(SGD, {"momentum": 0.9})]
)
def test_it_steps_what_was_moved_as_the_optimizer_alone_does(tmp_path, kind, options):
    for name, call in (MOVES | HARMLESS).items():
        losses, wanted = _train(kind, None, call, options)
        assert name == "assign" or losses[3] != losses[2]
        for where in ("cpu", str(tmp_path)):
            found, parameters = _train(kind, where, call, options)
            assert found == losses, (name, where)
            for p, q in zip(parameters, wanted, strict=True):
                assert p.dtype == q.dtype
                assert torch.equal(p, q), (name, where)


def test_an_optimizer_that_takes_no_cast_says_so(tmp_path):
    with pytest.raises(RuntimeError, match="dtype"):
        _train(torch.optim.AdamW, str(tmp_path), MOVES["half"], {})
