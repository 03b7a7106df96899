"""Layers of codes on several ranks: the bits of one, and folders for any number of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.adapters import LoRA
from pyops.mesh import ALONE
from pyops.models import GPT, GPTConfig
from pyops.quantized import FP8, Int4, Int8, IntN, Scheme, convert, load, save
from pyops.tensor_parallel import (
    ColumnConfig,
    ColumnParallelLinear,
    MLPConfig,
    ParallelMLP,
    Ranks,
    RowConfig,
    RowParallelLinear,
    sync_partial_grads,
)
from tests.adapters.adapted import filled, whole_gradients
from tests.grids import full

pytestmark = pytest.mark.cpu_only

SCHEMES = {
    "symmetric": Scheme(Int8(), Int8(per="token")),
    "asymmetric": Scheme(Int8(), Int8(per="token", symmetric=False)),
    "few bits": Scheme(IntN(3), Int8(per="token")),
}
STATIC = Scheme(Int8(), Int8(per="tensor"))
DIM, HIDDEN, TOKENS = 24, 42, 7  # 4 ranks divide neither inner width nor tokens


def inputs() -> Tensor:
    x = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(4))
    x[2] *= 100
    x[5] = 0
    x[6, 3] = torch.nan
    return x


def mlp(group: Any, hidden: int = HIDDEN, **options: Any) -> ParallelMLP:
    config = MLPConfig(activation="relu", seed=3, std=0.5)
    return ParallelMLP(DIM, hidden, config=config, group=group, **options).eval()


def outputs(rank: int, group: Any) -> dict[str, Tensor]:
    """Of MLPs, with tokens whole and cut, and of layers that gather or cut by themselves."""
    ranks, found = Ranks.of(group), {}
    for name, scheme in SCHEMES.items():
        for shared in (False, True):
            model = torch.nn.Sequential(mlp(group, sequence_parallel=shared))
            convert(model, scheme)
            x = inputs()
            each = ranks.rows_per_rank(TOKENS)
            if shared and ranks.size > 1:
                padded = torch.nn.functional.pad(x, (0, 0, 0, each * ranks.size - TOKENS))
                x = padded[rank * each : (rank + 1) * each]
            with torch.no_grad():
                y = model(x)
            if shared and ranks.size > 1:
                y = ranks.gather(y).wait()[:TOKENS]
            found[f"{name}, {shared}"] = y
        alone = torch.nn.Sequential(
            ColumnParallelLinear(
                DIM, HIDDEN, config=ColumnConfig(gather_output=True, seed=1, std=0.5), group=group
            ),
            RowParallelLinear(
                HIDDEN, DIM, config=RowConfig(scatter_input=True, seed=2, std=0.5), group=group
            ),
        )
        convert(alone, scheme)
        with torch.no_grad():
            found[f"{name}, moved"] = alone(inputs())
    model = torch.nn.Sequential(mlp(group)).eval()
    convert(model, STATIC, batches=[inputs()[:5]])
    with torch.no_grad():
        found["static"] = model(inputs())
    return found


@functools.cache
def of_one_process() -> dict[str, Tensor]:
    return outputs(0, ALONE)


@pytest.mark.parametrize("ranks", [full(2), 4])
def test_the_bits_of_one_process(world, ranks):
    expected = of_one_process()
    for found in world(ranks).run(outputs):
        assert found.keys() == expected.keys()
        for name, y in found.items():
            torch.testing.assert_close(
                y, expected[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
    for name, y in expected.items():
        assert y[:5].isfinite().all(), name
        assert y[6].isnan().all()
        assert y[2].abs().max() > 10 * y[0].abs().max() > 0


def long_sums(rank: int, group: Any) -> Tensor:
    """y of 4,096 inputs, of which the ranks have parts: sums that fp32 does not hold."""
    config = RowConfig(scatter_input=True, seed=3, std=0.5)
    model = torch.nn.Sequential(RowParallelLinear(4096, 4, config=config, group=group))
    with torch.no_grad():
        model[0].weight.copy_(0.9 + 0.1 * model[0].weight.sigmoid())
        convert(model, Scheme(Int8(), Int8(per="token")))
        return model(1 - 0.1 * torch.rand(3, 4096, generator=torch.Generator().manual_seed(1)))


def test_sums_beyond_the_whole_numbers_of_fp32(world):
    expected = long_sums(0, ALONE)
    assert float(expected.min()) > 0.9 * 0.9 * 4096  # codes of 114 and more: sums above 2^25
    for y in world(2).run(long_sums):
        assert torch.equal(y, expected)


CONFIG = GPTConfig(
    vocab_size=13,
    sequence_length=6,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    dim=32,
    hidden=64,
    activation="swiglu",
    tied_head=False,
)
ROWS = torch.arange(12).view(2, 6) % 13
KINDS = {
    "int8": SCHEMES["asymmetric"],
    "int4": Scheme(Int4(group=8, symmetric=False)),
    "fp8": Scheme(FP8()),
}


def folders(rank: int, group: Any, source: str, target: str | None) -> dict[str, Tensor]:
    """Logits of models read from folders, which one wrote unless `source` is empty."""
    found = {}
    for name, scheme in KINDS.items():
        model = GPT(CONFIG, seed=2, group=group).eval()
        if source:
            load(model, f"{source}/{name}")
        else:
            convert(model, scheme)
        with torch.no_grad():
            found[name] = model(ROWS)
            hidden = model.blocks[0].mlp(torch.ones(3, 32))
            found[f"{name} mlp"] = hidden[0] if isinstance(hidden, tuple) else hidden
        if target:
            save(model, f"{target}/{name}")
    return found


def test_a_folder_is_for_any_number_of_ranks(world, tmp_path):
    first = world(2).run(folders, "", str(tmp_path / "two"))[0]
    alone = folders(0, ALONE, str(tmp_path / "two"), str(tmp_path / "one"))
    four = world(4).run(folders, str(tmp_path / "one"), None)
    for found in (alone, *four):
        for name, y in found.items():
            torch.testing.assert_close(y, first[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(found["int8 mlp"], first["int8 mlp"])
    for name in KINDS:
        file = f"{name}/quantized.safetensors"
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def bias_gradient(scheme: Scheme, group: Any, shared: bool) -> Any:
    """Of a row-parallel layer that adds its bias itself: that of all tokens on every rank."""
    ranks = Ranks.of(group)
    model = torch.nn.Sequential(mlp(group, hidden=48, sequence_parallel=shared))
    convert(model, scheme)
    weights = torch.arange(6.0 * DIM).view(6, DIM)
    x = inputs()[:6]
    if shared and ranks.size > 1:
        x, weights = (t.tensor_split(ranks.size)[ranks.rank] for t in (x, weights))
    (model(x) * weights).sum().backward()
    return (DIM,), (0,), model[0].down.bias.grad


def gradients(rank: int, group: Any) -> dict[str, Any]:
    """Of adapters on layers of codes."""
    found = {}
    for name, scheme in KINDS.items():
        for shared in (False, True):
            model = GPT(CONFIG, seed=2, group=group, sequence_parallel=shared)
            convert(model, scheme)
            lora = filled(model, only=["blocks.*"])
            loss = model.loss(ROWS[:, :-1], ROWS[:, 1:])
            loss.backward()
            sync_partial_grads(model, group=group)
            whole = {"loss": ((), (), loss.detach()), **whole_gradients(lora)}
            whole["bias"] = bias_gradient(scheme, group, shared)
            found |= {f"{name} {shared} {key}": value for key, value in whole.items()}
    return found


@functools.cache
def gradients_alone() -> dict[str, Any]:
    return gradients(0, ALONE)


@pytest.mark.full
def test_adapters_on_codes_have_the_gradients_of_one_process(world):
    for found in world(2).run(gradients):
        assert found.keys() == gradients_alone().keys()
        for key, (shape, offset, part) in found.items():
            whole = gradients_alone()[key]
            assert shape == whole[0]
            where = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            assert whole[2].abs().max() > 1e-9, key
            torch.testing.assert_close(
                part, whole[2][where], rtol=1e-3, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
            )


def refused(rank: int, group: Any) -> list[str]:
    """What every rank says where one rank's weight is not finite, and where groups do not fit."""
    said = []
    for scheme, spoil in ((SCHEMES["symmetric"], True), (Scheme(Int4(group=16)), False)):
        model = torch.nn.Sequential(mlp(group))
        if spoil and rank == 1:
            with torch.no_grad():
                model[0].down.weight[0, 0] = torch.inf
        with pytest.raises(ValueError) as caught:
            convert(model, scheme)
        said.append(str(caught.value))
        assert isinstance(model[0].up, ColumnParallelLinear)
        assert isinstance(model[0].down, RowParallelLinear)
    return said


def test_all_ranks_refuse_alike(world):
    first, second = world(2).run(refused)
    assert first == second
    assert "the weight of 0.down is inf at [0, 0]" in first[0]
    assert "groups of 16 do not divide" in first[1]


def test_lora_counts_layers_of_codes():
    model = torch.nn.Sequential(mlp(ALONE))
    convert(model, SCHEMES["symmetric"])
    assert len(LoRA(model, rank=2).layers) == 2
