"""close(): the model is as it was without an optimizer, whole, and another one may take it."""

from __future__ import annotations

import pytest
import torch

from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.zero.making import zero_optimizer
from tests.zero.models import Net, mean_loss, part


def hooks_of(model):
    """How many there are on its modules and parameters."""
    found = 0
    for module in model.modules():
        for kind in (
            "_forward_pre_hooks",
            "_forward_hooks",
            "_state_dict_pre_hooks",
            "_backward_hooks",
        ):
            found += len(getattr(module, kind))
    return found + sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())


def body(rank, group, stage, options):
    """Train, close, train with plain torch, and with an optimizer of another stage."""
    model = Net(mixed=False)
    zero = zero_optimizer(
        model, AdamW, stage=stage, bucket_bytes=1 << 10, group=group, lr=1e-2, **options
    )
    for step in range(2):
        mean_loss(model, *part(step, rank, 2)).backward()
        zero.step()
    before = hooks_of(model)
    with zero.whole_parameters():
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
    zero.close()
    zero.close()
    assert before > 0
    assert hooks_of(model) == 0
    for name, p in model.named_parameters():
        assert torch.equal(p, values[name]), name
        assert p.untyped_storage().nbytes() == p.nbytes, f"{name} keeps the memory of others"
    with pytest.raises(RuntimeError, match="closed; make a new one"):
        zero.step()
    mean_loss(model, *part(2, rank, 2)).backward()
    assert model.blocks[0].inner.weight.grad is not None, "nobody takes the gradient away"
    assert float(model.blocks[0].inner.weight.grad.square().sum()) > 0
    model.zero_grad()
    after = ZeroOptimizer(
        model, AdamW, ZeroConfig(stage=2 if stage < 2 else 0), group=group, lr=1e-2
    )
    mean_loss(model, *part(2, rank, 2)).backward()
    after.step()
    moved = {name: not torch.equal(p, values[name]) for name, p in model.named_parameters()}
    return moved["first.weight"], moved["blocks.2.outer.weight"], moved["frozen.weight"]


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {}),
        (1, {"overlap_param_gather": True}),
        (2, {"offload": "cpu", "delayed_update": True}),
        (3, {}),
        (3, {"offload": "cpu"}),
    ],
)
def test_the_model_is_whole_and_free(world, stage, options):
    assert world(2).run(body, stage, options) == [(True, True, False)] * 2
