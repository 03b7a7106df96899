"""A model computes with N:M weights while its parameters stay dense, whole and on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pyops.flat import Placement
from pyops.models import GPT, GPTConfig
from pyops.optim import AdamW
from pyops.pruning import NM, masks_of, nm_masks, sparse_training
from pyops.pruning.ranking.choice import prunable

pytestmark = pytest.mark.cpu_only

SHAPE = {"vocab_size": 20, "sequence_length": 12, "num_layers": 2, "num_heads": 4, "dim": 16}
GATED = {"activation": "swiglu", "hidden": 32, "num_kv_heads": 2, "norm": "rmsnorm"}
PATTERN = NM(2, 4)


def gpt(**options: Any) -> GPT:
    return GPT(GPTConfig(**SHAPE, **GATED), dtype=torch.float64, **options)


def rows() -> tuple[Tensor, Tensor]:
    text = torch.randint(20, (3, 13), generator=torch.Generator().manual_seed(1))
    return text[:, :-1], text[:, 1:]


def test_layers_compute_with_masked_weights_and_parameters_stay():
    """Those that are given to a layer's own forward, and those that attention projects together."""
    model = gpt()
    other = copy.deepcopy(model)
    nm_masks(other)
    names, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    dense = model.loss(*rows())
    with sparse_training(model, pattern=PATTERN, decay=0.0) as sparse:
        assert sparse.names == list(prunable(other))
        assert len(sparse.names) == 2 * 5  # q, kv, output, up with gate, down
        loss = model.loss(*rows())
        assert torch.equal(loss, other.loss(*rows()))
        assert abs(float(loss.detach() - dense.detach())) > 1e-4
        assert list(model.state_dict()) == names
        assert set(Placement.of(model)) == set(Placement.of(other))
        assert torch.equal(copy.deepcopy(model).loss(*rows()), loss)
        model.loss(*rows()).backward()
        other.loss(*rows()).backward()
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name  # of every weight, alive or not
            assert p.grad.abs().max() > 0
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        model.blocks[0].forward = lambda *args, f=model.blocks[0].forward, **options: checkpoint(
            f, *args, use_reentrant=False, **options
        )
        model.loss(*rows()).backward()
        del model.blocks[0].forward
        assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters())
    assert [type(m) for m in model.modules()] == kinds
    assert torch.equal(model.loss(*rows()), dense)


def test_finish_makes_masks_of_what_was_computed():
    model = gpt()
    sparse = sparse_training(model)
    loss = model.loss(*rows())
    masks = sparse.finish()
    assert torch.equal(model.loss(*rows()), loss)
    assert set(masks) == set(sparse.names) == set(masks_of(model))
    assert masks.sparsity == 0.5


@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW], ids=["torch", "pyops"])
def test_both_decays_by_hand(kind: Any):
    """One step of AdamW: the term in the gradient, or taken off the weights before the step."""
    dtype = torch.float64 if kind is torch.optim.AdamW else torch.float32
    linear = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 1)).to(dtype)
    x = torch.randn(5, 8, dtype=dtype)
    start = linear[0].weight.detach().clone()
    lost = start - PATTERN.masked(start)
    assert lost.count_nonzero() == 24
    steps = []
    for decoupled in (False, True):
        expected, model = copy.deepcopy(linear), copy.deepcopy(linear)
        weight = expected[0].weight
        with torch.no_grad():
            weight.copy_(PATTERN.masked(start))
        expected(x).square().sum().backward()
        with torch.no_grad():
            weight.copy_(start - 0.1 * 0.4 * lost if decoupled else start)
            weight.grad += 0.0 if decoupled else 0.4 * lost
        kind(expected.parameters(), lr=0.1, weight_decay=0.01, eps=1e-2).step()
        optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.01, eps=1e-2)
        options = {"optimizer": optimizer} if decoupled else {}
        sparse = sparse_training(model, decay=0.4, only=["0"], **options)
        model(x).square().sum().backward()
        optimizer.step()
        sparse.remove()
        exact = 1e-13 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(model[0].weight, weight, rtol=exact, atol=exact)
        assert not optimizer._optimizer_step_pre_hooks
        steps.append(model[0].weight.detach().clone())
    assert (steps[0] - steps[1]).abs().max() > 1e-3


def on_ranks(rank: int, group: Any, ranks: int) -> list[float]:
    """Losses of four steps."""
    model = gpt(group=group) if ranks > 1 else gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    found = []
    with sparse_training(model, decay=0.01):
        for _ in range(4):
            loss = model.loss(*rows())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
    return found


def test_two_ranks_compute_what_one_does(world):
    alone = on_ranks(0, None, 1)
    assert alone[-1] < alone[0] - 0.1
    for found in world(2).run(on_ranks, 2):
        assert found == pytest.approx(alone, rel=1e-11)


def misfit_on_ranks(rank: int, group: Any) -> str:
    """Inputs of down: 12 whole, and 6 on each of two ranks."""
    model = GPT(GPTConfig(**SHAPE, hidden=12), group=group)
    before = [type(m) for m in model.modules()]
    with pytest.raises(ValueError) as error:
        sparse_training(model)
    assert [type(m) for m in model.modules()] == before
    return str(error.value)


def test_groups_that_ranks_would_cut_are_refused(world):
    for text in world(2).run(misfit_on_ranks):
        assert "blocks.0.mlp.down.weight can't be 2:4: its 6 inputs" in text
        assert "(it is (16, 6) here, and (16, 12) whole)" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": -1.0}, r"decay is -1.0; give 0 or more"),
        ({"decay": float("inf")}, r"decay is inf; give 0 or more"),
        ({"pattern": "2:4"}, r"pattern is '2:4'; give an NM"),
        ({"decoupled": True}, r"decoupled=True needs the optimizer.*got NoneType"),
        ({"only": ["head"]}, r"only: 'head' matches none of"),
        (
            {"decoupled": True, "optimizer": torch.optim.SGD([torch.zeros(2)], lr=1.0)},
            r"blocks.0.attention.q.weight \(torch.float64\) is not held by the optimizer",
        ),
    ],
)
def test_what_is_refused(options: dict, message: str):
    model = gpt()
    with pytest.raises((ValueError, TypeError), match=message):
        sparse_training(model, **options)
    assert not hasattr(model.blocks[0].mlp.up, "_sparse_rules")


def test_owners_that_exclude_each_other():
    model = gpt()
    with sparse_training(model), pytest.raises(ValueError, match=r"already; call remove\(\)"):
        sparse_training(model)
    nm_masks(model, only=["*.down"])
    with pytest.raises(ValueError, match=r"down.weight has a mask already; call release\(\)"):
        sparse_training(model)
    frozen = gpt().requires_grad_(False)
    with pytest.raises(ValueError, match=r"is frozen or quantized"):
        sparse_training(frozen, only=["blocks.*"])
