"""N:M patterns, transposable ones, and SR-STE against float64 by hand."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from pyops.models import GPT, GPTConfig
from pyops.pruning import NM, magnitude, nm_masks, sparse_weight
from pyops.pruning.nm import PATTERNS
from pyops.pruning.ranking.choice import prunable

pytestmark = pytest.mark.cpu_only


def test_ninety_patterns_of_a_tile():
    """As many as there are 4 x 4 matrices of zeros and ones with two in each row and column."""
    assert len(set(PATTERNS)) == 90


def test_transposable_masks_are_the_best_of_all():
    torch.manual_seed(2)
    w = torch.randn(8, 12)
    alive = NM(2, 4, transposable=True).alive(w)
    tiles = [product(range(2), repeat=4)]
    rows = [r for r in tiles[0] if sum(r) == 2]
    squares = torch.tensor(
        [s for s in product(rows, repeat=4) if [sum(c) for c in zip(*s, strict=True)] == [2] * 4]
    )
    assert len(squares) == 90
    for r, c in product((0, 4), (0, 4, 8)):
        tile, mask = w[r : r + 4, c : c + 4].abs(), alive[r : r + 4, c : c + 4]
        assert mask.sum(0).tolist() == mask.sum(1).tolist() == [2] * 4
        best = float((squares * tile).sum((1, 2)).max())
        assert float(tile[mask].sum()) == pytest.approx(best, rel=1e-6)
    kept = [float(w.abs()[p.alive(w)].sum()) for p in (NM(2, 4), NM(2, 4, transposable=True))]
    assert kept[0] > kept[1]
    assert torch.equal(NM(2, 4, transposable=True).alive(w.t()), alive.t())


def test_groups_lie_along_inputs():
    matrix = torch.zeros(4, 8)
    matrix[0] = torch.arange(8.0)
    assert NM(2, 4).alive(matrix)[0].tolist() == [False, False, True, True] * 2
    kernel = torch.randn(3, 8, 3, 3)
    assert NM(1, 4).alive(kernel).sum(1).unique().tolist() == [2]
    stacked = torch.randn(2, 5, 8)
    assert torch.equal(NM(2, 4).alive(stacked)[1], NM(2, 4).alive(stacked[1]))


def by_hand(
    w: Tensor, x: Tensor, target: Tensor, decay: float, lr: float
) -> tuple[Tensor, list[Tensor]]:
    """Two steps on the squared error of x (m w)^T, derivative and mask by hand."""
    masks = []
    for _ in range(2):
        mask = torch.zeros_like(w)
        for r in range(len(w)):
            for at in range(0, w.shape[1], 4):
                group = sorted(range(4), key=lambda i: (-abs(float(w[r, at + i])), i))
                for i in group[:2]:
                    mask[r, at + i] = 1.0
        masks.append(mask)
        error = x @ (mask * w).t() - target
        w = w - lr * (2 * error.t() @ x + decay * (1 - mask) * w)
    return w, masks


def test_the_gradient_of_sr_ste_while_masks_change():
    torch.manual_seed(1)
    w, x, target = (
        torch.randn(3, 8).double(),
        torch.randn(9, 8).double(),
        torch.randn(9, 3).double(),
    )
    expected, masks = by_hand(w, x, target, 0.3, 0.02)
    assert not torch.equal(*masks), "no mask changes between the two steps"
    leaf = w.clone().requires_grad_()
    for _ in range(2):
        loss = (x @ sparse_weight(leaf, NM(2, 4), decay=0.3).t() - target).square().sum()
        (grad,) = torch.autograd.grad(loss, leaf)
        with torch.no_grad():
            leaf -= 0.02 * grad
    torch.testing.assert_close(leaf.detach(), expected, rtol=1e-13, atol=1e-14)
    plain, _ = by_hand(w, x, target, 0.0, 0.02)
    assert (plain - expected).abs().max() > 1e-3


def small() -> GPT:
    return GPT(GPTConfig(vocab_size=20, sequence_length=8, num_layers=1, num_heads=2, dim=16))


def test_pruning_once():
    model = small()
    before = {name: p.clone() for name, p in model.named_parameters()}
    masks = nm_masks(model, NM(2, 4), only=["blocks.*"])
    assert set(masks) == {
        f"blocks.0.{name}.weight"
        for name in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
    }
    assert set(masks) == set(prunable(small()))
    assert masks.sparsity == 0.5
    for name, parameter in model.named_parameters():
        if name not in masks:
            assert torch.equal(parameter, before[name])
            continue
        kept = parameter.unflatten(1, (-1, 4)).count_nonzero(2)
        assert bool((kept == 2).all())
        smallest = before[name].abs().unflatten(1, (-1, 4)).sort(2).values[..., 1]
        least = torch.where(parameter != 0, parameter.abs(), torch.inf)
        assert bool((least.unflatten(1, (-1, 4)).amin(2) >= smallest).all())


class RelativeBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(8, 8), RelativeBias()
        self.conv, self.depthwise = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.two_bias = nn.Parameter(torch.ones(2, 8))


def test_one_rule_says_which_parameters_are_pruned():
    """A pattern leaves out what has one input besides what magnitude leaves out."""
    matrices = {"conv.weight", "linear.weight"}
    assert set(prunable(Mixed())) == matrices
    assert set(magnitude(Mixed(), 0.5)) == matrices | {"depthwise.weight"}
    everything = {"words.weight", "places.weight", "depthwise.weight", "head.weight", *matrices}
    assert set(magnitude(Mixed(), 0.5, only=["*"])) == everything
    for only in (["linear"], ["lin*.weight"], ["linear.weight"]):
        assert set(nm_masks(Mixed(), only=only)) == {"linear.weight"}
        assert set(magnitude(Mixed(), 0.5, only=only)) == {"linear.weight"}
    with pytest.raises(ValueError, match=r"depthwise.weight can't be 2:4: its 1 inputs"):
        nm_masks(Mixed(), only=["depthwise"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NM(5, 4), r"NM\(5, 4\): n of m must be 1 <= n <= m"),
        (lambda: NM(2.0, 4), r"NM\(2.0, 4\): n of m must be"),
        (lambda: NM("2", 4), r"NM\('2', 4\): n of m must be"),
        (lambda: nm_masks(small(), "2:4"), r"pattern is '2:4'; give an NM, such as NM\(2, 4\)"),
        (lambda: NM(1, 4, transposable=True), r"transposable masks are of 2:4; got 1:4"),
        (
            lambda: nm_masks(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), NM(2, 4)),
            r"0.weight can't be 2:4: its 6 inputs are no multiple of 4 \(it is \(4, 6\) here",
        ),
        (lambda: nm_masks(small(), only=["blocks.7.*"]), r"only: 'blocks.7.\*' matches none of"),
        (
            lambda: nm_masks(small().requires_grad_(False), only=["blocks.*"]),
            r"only: blocks.0.attention.qkv.weight is frozen or quantized",
        ),
    ],
)
def test_what_is_refused(call, message: str):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_a_nan_is_refused_and_nothing_is_changed():
    model = small()
    with torch.no_grad():
        model.blocks[0].mlp.down.weight[3, 3] = torch.nan
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"mlp.down.weight has a weight that is nan"):
        nm_masks(model)
    for a, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
