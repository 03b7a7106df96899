"""Layers on a grid are those of one rank: results and gradients, of sizes that nothing divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.mesh import ALONE
from pyops.tensor_parallel import (
    AttentionConfig,
    EmbeddingConfig,
    LayerNorm,
    MLPConfig,
    ParallelAttention,
    ParallelMLP,
    Ranks,
    RMSNorm,
    initialize_model_,
    rotary_tables,
    set_dropout,
)
from pyops.tensor_parallel.grids import (
    Grid,
    GridAttention,
    GridEmbedding,
    GridHead,
    GridLayerNorm,
    GridLinear,
    GridLinearConfig,
    GridMLP,
    GridResidual,
    GridRMSNorm,
    GridRows,
    GridSequential,
)
from tests.tensor_parallel.grids.virtual_grids import (
    SMALL,
    Shape,
    assert_equal,
    block,
    numbers,
    on_grid,
)

pytestmark = pytest.mark.cpu_only

B, T, D = 5, 3, 10
GRIDS = [("2d", (2, 2)), ("2d", (2, 1)), ("2.5d", (2, 2, 2)), ("3d", (2, 2, 2))]
F64 = {"dtype": torch.float64}


def perturb(layer: nn.Module) -> None:
    """Biases and norms that differ from element to element, drawn by place."""
    initialize_model_(layer, seed=3, std=0.3)
    for module in layer.modules():
        for name, p in module.named_parameters(recurse=False):
            if "bias" in name or p.dim() == 1:
                place = getattr(module, "placements", {}).get(name)
                shape = p.shape if place is None else place.global_shape
                whole = numbers(*shape, seed=len(name)) if len(shape) == 1 else numbers(*shape)
                with torch.no_grad():
                    p.copy_(whole if place is None else place.take(whole))


def compare(
    mode: str,
    shape: Shape,
    make: Callable[[Grid], nn.Module],
    alone: nn.Module,
    x: Tensor,
    *,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x),
    width: int = D,
    tolerance: float = 1e-12,
) -> None:
    """Results, and gradients of x and of all parameters, of one rank and of the grid's blocks."""
    perturb(alone)
    alone_x = x.clone().requires_grad_()
    y = call(alone, alone_x)
    dy = numbers(*y.shape, seed=9).to(y.dtype)
    y.backward(dy)

    def body(grid: Grid) -> None:
        layer = make(grid)
        perturb(layer)
        cuts, behind = layer.cuts, layer.behind
        own = block(grid, x, cuts)
        found = call(layer, own)
        what = f"{mode} {shape} rank {grid.rank}"
        start, stop, _ = grid.rows(len(x), behind)
        rows = stop - start
        assert_equal(found.detach()[:rows], grid.take(y.detach(), behind)[:rows], what, tolerance)
        found.backward(grid.take(dy, behind))
        assert_equal(own.grad, grid.take(alone_x.grad, cuts), f"{what}: x", tolerance)
        places = {
            f"{prefix}.{name}" if prefix else name: place
            for prefix, module in layer.named_modules()
            for name, place in getattr(module, "placements", {}).items()
        }
        theirs = dict(alone.named_parameters())
        assert set(theirs) == set(places) == {n for n, _ in layer.named_parameters()}
        for name, p in layer.named_parameters():
            assert theirs[name].grad.abs().max() > 0, name
            expected = places[name].take(theirs[name].grad)
            assert_equal(p.grad, expected, f"{what}: {name}", tolerance)

    on_grid(mode, shape, body)


@pytest.mark.parametrize("form", ["ab", "abt"])
@pytest.mark.parametrize(("mode", "shape"), SMALL)
def test_linear(mode, shape, form):
    config = GridLinearConfig(form=form)
    compare(
        mode,
        shape,
        lambda grid: GridLinear(D, 7, grid=grid, config=config, **F64),
        nn.Linear(D, 7, **F64),
        numbers(B, T, D),
    )


@pytest.mark.parametrize(("mode", "shape"), GRIDS)
def test_layers_one_after_the_other_with_a_residual(mode, shape):
    def make(grid: Grid) -> nn.Module:
        up = GridLinear(D, 7, grid=grid, **F64)
        down = GridLinear(7, D, grid=grid, cuts=up.behind, **F64)
        return GridResidual(GridSequential(up, nn.Tanh(), down))

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(D, 7, **F64), nn.Tanh(), nn.Linear(7, D, **F64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    compare(mode, shape, make, Residual(), numbers(B, T, D))


def test_an_odd_number_of_layers_has_no_residual_in_three_dimensions():
    grid = Grid(None, mode="3d")
    one = GridLinear(4, 4, grid=grid)
    with pytest.raises(ValueError, match="an even number of linear layers"):
        GridResidual(one)
    with pytest.raises(ValueError, match="layer 1 takes rows over weight and input"):
        GridSequential(one, GridLinear(4, 4, grid=grid))
    flat = Grid(None, mode="2d")
    GridResidual(GridLinear(4, 4, grid=flat))


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(("mode", "shape"), GRIDS)
def test_norms(mode, shape, kind):
    if kind == "layer":
        alone: nn.Module = nn.LayerNorm(D, **F64)
        compare(mode, shape, lambda g: GridLayerNorm(D, grid=g, **F64), alone, numbers(B, T, D))
    else:
        alone = RMSNorm(D, group=ALONE, **F64)
        compare(mode, shape, lambda g: GridRMSNorm(D, grid=g, **F64), alone, numbers(B, T, D))


def test_a_norm_of_a_large_mean_keeps_its_digits():
    x = (1e4 + numbers(4, 3, 32, seed=4)).float()
    exact = nn.functional.layer_norm(x.double(), (32,))

    def body(grid: Grid) -> float:
        y = GridLayerNorm(32, grid=grid)(grid.take(x))
        return (y.double() - grid.take(exact)).abs().max().item()

    assert max(on_grid("2d", (2, 2), body)) < 1e-6 * exact.abs().max().item()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("mode", "shape"), GRIDS)
def test_mlp_with_dropout(mode, shape, gated):
    config = MLPConfig(activation="silu" if gated else "gelu", gated=gated, dropout=0.3)

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        set_dropout(layer, seed=1, step=2, shape=(B, T), first_row=3)
        return layer(x)

    compare(
        mode,
        shape,
        lambda grid: GridMLP(D, 13, config, grid=grid, form="ab" if gated else "abt", **F64),
        ParallelMLP(D, 13, config, group=ALONE, **F64),
        numbers(B, T, D),
        call=call,
    )


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize(("mode", "shape"), GRIDS)
def test_attention_with_dropout_documents_and_rotary_positions(mode, shape, groups):
    config = AttentionConfig(num_kv_heads=groups, head_dim=4, causal=True, dropout=0.2)
    documents = torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 0], [0, 1, 2], [0, 0, 1]]).int()
    turns = tuple(t.double() for t in rotary_tables(T, 4))

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        set_dropout(layer, seed=1, step=2, shape=(B, T), first_row=3)
        mask = {"mask": documents}
        return layer(x, rotary=tuple(t.float() for t in turns), **mask)

    compare(
        mode,
        shape,
        lambda grid: GridAttention(
            D, 4, config, grid=grid, form="ab" if groups == 2 else "abt", **F64
        ),
        ParallelAttention(D, 4, config, group=ALONE, **F64),
        numbers(B, T, D),
        call=call,
    )


class Ends(nn.Module):
    """An embedding, and the loss over the same words."""

    def __init__(self, tied: bool, grid: Grid | None) -> None:
        super().__init__()
        self.tied, self.grid = tied, grid
        config = EmbeddingConfig(seed=1)
        if grid is None:
            self.words, self.head = nn.Embedding(11, D, **F64), nn.Linear(D, 11, False, **F64)
            self.places: Any = nn.Embedding(T, D, **F64)
            if tied:
                self.head.weight = self.words.weight
        else:
            self.words = GridEmbedding(11, D, config, grid=grid, **F64)
            tied_to = self.words if tied else None
            self.head = GridHead(11, D, grid=grid, tied=tied_to, **F64)
            self.places = GridRows(T, D, grid=grid, **F64)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.grid is None:
            x = self.words(tokens) + self.places(torch.arange(T))
            logits = self.head(x.tanh())
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        x = self.words(tokens)
        x = (x + self.places(torch.arange(T).expand(len(x), T))).tanh()
        return self.head.loss(x, targets)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("mode", "shape"), SMALL)
def test_embedding_and_loss_with_targets_that_do_not_count(mode, shape, tied):
    tokens = torch.arange(B * T).view(B, T) * 7 % 11
    targets = (tokens * 3 + 1) % 11
    targets[0] = -100  # the ranks of the first rows have fewer that count
    targets[1, :2] = -100
    alone = Ends(tied, None)
    initialize_model_(alone, seed=3, std=0.5)
    loss = alone(tokens, targets)
    loss.backward()
    theirs = dict(alone.named_parameters())

    def body(grid: Grid) -> None:
        model = Ends(tied, grid)
        initialize_model_(model, seed=3, std=0.5)
        found = model(tokens, targets)
        assert abs(found.item() - loss.item()) < 1e-12
        found.backward()
        places = {}
        for prefix, module in model.named_modules():
            for name, place in getattr(module, "placements", {}).items():
                places.setdefault(f"{prefix}.{name}", place)
        for name, p in model.named_parameters():
            expected = places[name].take(theirs[name].grad)
            assert_equal(p.grad, expected, f"{mode} {shape} {grid.rank} {name}")
        logits = model.head(model.words(tokens), (B, T))
        expected = alone.head(alone.words(tokens)).detach()
        assert_equal(logits.detach(), expected, "logits")

    on_grid(mode, shape, body)


def test_layers_refuse_what_does_not_fit():
    def refuse(grid: Grid) -> None:
        with pytest.raises(ValueError, match="num_heads is 3, which the 2 ranks along 'column'"):
            GridAttention(12, 3, grid=grid)
        with pytest.raises(ValueError, match="num_kv_heads is 1, which the 2 ranks along 'column'"):
            GridAttention(12, 4, AttentionConfig(num_kv_heads=1), grid=grid)
        with pytest.raises(ValueError, match="attention on a grid has no cross=True"):
            GridAttention(12, 4, AttentionConfig(cross=True), grid=grid)
        with pytest.raises(ValueError, match=r"takes \[..., 2\], this rank's columns of 4"):
            GridLinear(4, 4, grid=grid)(torch.ones(2, 4))
        with pytest.raises(ValueError, match=r"takes \[..., 2\], this rank's columns of 4"):
            GridLayerNorm(4, grid=grid)(torch.ones(2, 4))
        with pytest.raises(ValueError, match="token 9 is outside the vocabulary of 8: 0 to 7"):
            GridEmbedding(8, 4, grid=grid)(torch.tensor([[1, 9]]))
        with pytest.raises(ValueError, match="in_features is 0; it must be 1 or more"):
            GridLinear(0, 4, grid=grid)
        with pytest.raises(ValueError, match="form is 'atb' and stacked 0"):
            GridLinear(4, 4, grid=grid, config=GridLinearConfig(form="atb"))

    on_grid("2d", (2, 2), refuse)
    with pytest.raises(ValueError, match="num_heads x head_dim is 6, but a 3d grid of 2 x 2 x 2"):
        on_grid("3d", (2, 2, 2), lambda grid: GridAttention(6, 2, grid=grid))


def test_ranks_that_multiply_other_dtypes_are_all_told():
    def refuse(grid: Grid) -> None:
        layer = GridLinear(4, 4, grid=grid)
        layer(torch.ones(2, 2))
        message = r"rank 0 of 2d grid 2 x 2 multiplies matrices of torch.float64, rank 3 .*bfloat16"
        dtype = torch.bfloat16 if grid.rank == 3 else torch.float64
        with pytest.raises(ValueError, match=message):
            layer.to(dtype)(torch.ones(2, 2, dtype=dtype))
        with pytest.raises(ValueError, match=message):
            GridEmbedding(8, 4, grid=grid, dtype=dtype)(torch.tensor([[1, 2]]))

    on_grid("2d", (2, 2), refuse)


def test_layers_of_one_dimension_are_not_among_those_of_a_grid():
    def refuse(grid: Grid) -> None:
        ranks = Ranks(ALONE, grid.rank, grid.size)
        mlp = nn.Sequential(nn.GELU(), ParallelMLP(4, 8, group=ranks))
        for make in (lambda: GridSequential(GridLinear(4, 4, grid=grid), mlp), GridResidual):
            with pytest.raises(ValueError, match=r"is a ColumnParallelLinear, which its ranks cut"):
                make(mlp) if make is GridResidual else make()
        alone = nn.Sequential(nn.LayerNorm(2), ParallelMLP(2, 4, group=ALONE))
        GridResidual(alone)

    on_grid("2d", (2, 2), refuse)


def test_a_grid_of_one_rank_sends_nothing():
    for mode in ("2d", "2.5d", "3d"):
        grid = Grid(None, mode=mode)
        x = numbers(2, 3, 4)
        layer = GridSequential(GridLinear(4, 6, grid=grid, **F64))
        layer(x).sum().backward()
        GridLayerNorm(4, grid=grid, **F64)(x).sum().backward()
        assert grid.traffic.messages == 0


def test_norms_are_those_of_one_dimension_in_half_precision():
    x = numbers(4, 3, 16).bfloat16()
    exact = LayerNorm(16, group=ALONE)(x.float()).detach()

    def body(grid: Grid) -> Tensor:
        y = GridLayerNorm(16, grid=grid, dtype=torch.bfloat16)(grid.take(x))
        return grid.whole(y, batch=4, width=16)

    for y in on_grid("2d", (2, 2), body):
        assert torch.equal(y, exact.bfloat16())
