"""Adapters on several ranks learn what they learn on one, with ZeRO, too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pyops
from pyops.adapters import LoRA, save
from pyops.mesh import ALONE
from pyops.models import GPT, GPTConfig
from pyops.tensor_parallel import set_dropout, sync_partial_grads
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.adapters.adapted import filled, whole_gradients
from tests.grids import cut
from tests.models.families import BATCH, LENGTH, loss_of, make

NAMES = ("gpt", "llama", "t5", "vit")
WIDE = GPTConfig(vocab_size=13, sequence_length=5, num_layers=2, num_heads=4, dim=64)
ROWS = torch.arange(20).view(4, 5) % 13


def gradients(rank: int, group: Any, sequence_parallel: bool) -> dict[str, Any]:
    """Of the adapters of every layer, heads and dropout among them."""
    found = {}
    for name in NAMES:
        options = {"group": group, "sequence_parallel": sequence_parallel}
        model = make(name, **options, dtype=torch.float64)
        dropout = 0.0 if name in ("t5", "vit") else 0.3
        lora = filled(model, only=["*"], dropout=dropout)
        if dropout:
            set_dropout(model, seed=9, step=3, shape=(BATCH, LENGTH))
        loss = loss_of(model, step=3)
        loss.backward()
        sync_partial_grads(model, group=group)
        found[name] = {"loss": ((), (), loss.detach()), **whole_gradients(lora)}
    return found


@functools.cache
def alone() -> dict[str, Any]:
    return gradients(0, ALONE, False)


GRID = [(2, False), (2, True), (4, False), (4, True)]


@pytest.mark.parametrize(("ranks", "sequence_parallel"), cut(GRID, keep=[(2, True)]))
def test_gradients_on_several_ranks(world, ranks, sequence_parallel):
    for found in world(ranks).run(gradients, sequence_parallel):
        for name in NAMES:
            assert found[name].keys() == alone()[name].keys()
            for key, (shape, offset, part) in found[name].items():
                whole = alone()[name][key]
                assert shape == whole[0]
                where = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
                assert whole[2].abs().max() > 1e-9, key
                torch.testing.assert_close(
                    part, whole[2][where], rtol=0, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}"
                )


def tuned(model: Any, stage: int | None, rank: int, ranks: int, group: Any) -> tuple[Any, LoRA]:
    """Three steps on this rank's rows."""
    lora = LoRA(model, rank=2, alpha=4, seed=1)
    options: dict[str, Any] = {"lr": 0.05, "eps": 1e-3}
    if stage is None:
        optimizer: Any = pyops.optim.AdamW(lora.parameters(), **options)
    else:
        optimizer = ZeroOptimizer(
            model, pyops.optim.AdamW, ZeroConfig(stage=stage), group=group, **options
        )
    share = len(ROWS) // ranks
    rows = ROWS[rank * share : (rank + 1) * share]
    for _ in range(3):
        model.loss(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, lora


def shared_base(rank: int, group: Any, folder: str, stage: int) -> dict[str, Any]:
    model = GPT(WIDE).eval()
    base = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer, lora = tuned(model, stage, rank, 2, group)
    kept = optimizer.memory()
    if stage == 3:
        with pytest.raises(RuntimeError, match="whole_parameters"):
            save(lora, folder)
        with pytest.raises(RuntimeError, match="whole_parameters"):
            lora.merge()
    with optimizer.whole_parameters():
        if rank == 0:
            save(lora, folder)
        same = all(torch.equal(model.get_parameter(n), p) for n, p in base.items())
    sizes = {
        "base": 4 * sum(p.numel() for p in base.values()),
        "adapters": 4 * sum(p.numel() for p in lora.parameters()),
    }
    return {"same": same, **kept, **sizes}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_base_that_zero_shares_out(world, tmp_path, stage):
    """Unchanged bit for bit, half of it on each of two ranks with stage 3; the file has whole
    adapters, those of one process."""
    found = world(2).run(shared_base, str(tmp_path / "adapters"), stage)
    _, lora = tuned(GPT(WIDE).eval(), None, 0, 1, ALONE)
    save(lora, tmp_path / "alone")
    for each in found:
        assert each["same"]
        if stage == 3:  # and some bytes of padding
            assert each["parameters"] <= 0.5 * (each["base"] + each["adapters"]) + 8192
        # Two for each element of half of the adapters, and none of the base.
        assert 0.5 * each["adapters"] < each["states"] <= each["adapters"] + 8192
        assert each["base"] > 200_000
    written, expected = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapters", "alone")
    )
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.numel() > 0
        torch.testing.assert_close(written[name], tensor, rtol=0, atol=1e-5)
        if "lora_B" in name:
            assert tensor.abs().max() > 1e-3
