"""[parallel] pp puts layers on ranks, with tp, dp and [zero]; losses, norms, weights and samples stay as they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pyops.checkpoint import load
from pyops.config import Config, ZeroConfig
from pyops.parallel import ParallelConfig
from pyops.train import train
from tests.tiny_run import STEPS, config_of, losses, norms, same, train_on_rank

pytestmark = pytest.mark.cpu_only


def cut(config: Config, name: str, *, stage: int = 0, **parallel: Any) -> Config:
    return dataclasses.replace(config, name=name, parallel=ParallelConfig(**parallel), zero=ZeroConfig(stage))


def saved(config: Config, step: int = STEPS) -> dict[str, Any]:
    return load(config.folder / "checkpoints" / f"step-{step:08}")[0]


@pytest.mark.parametrize(
    ("ranks", "stage", "parallel"),
    [
        (2, 0, {"pp": 2, "schedule": "zb1p"}),
        (4, 0, {"pp": 2, "tp": 2, "sequence_parallel": True}),
        (4, 1, {"pp": 2, "dp": 2, "schedule": "1f1b", "recompute": "except_last"}),
    ],
)
def test_neither_losses_nor_norms_nor_weights_change(world, tmp_path, ranks, stage, parallel):
    plain = config_of(tmp_path, "cpu", name="plain", dropout=0.1, micro_batch=2)
    config = cut(plain, "cut", stage=stage, **parallel)
    train(plain)
    outcomes = world(ranks).run(train_on_rank, config)
    assert [getattr(outcome, "steps", outcome) for outcome in outcomes] == [STEPS] * ranks
    assert same(losses(config), losses(plain))
    assert same(norms(config), norms(plain), within=1e-4)
    assert losses(plain)[-1] < losses(plain)[0] - 0.8
    ours, theirs = saved(config), saved(plain)
    assert ours["model"].keys() == theirs["model"].keys()
    assert ours["optimizer"].keys() == theirs["optimizer"].keys()
    for name, tensor in theirs["model"].items():
        torch.testing.assert_close(ours["model"][name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert torch.equal(ours["model"]["embedding.token.weight"], ours["model"]["head.output.weight"])
    assert (config.folder / "sample.txt").read_text() == (plain.folder / "sample.txt").read_text()
