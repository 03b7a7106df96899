"""Layers without parameters, an activation say, are held by every rank, saved by none, and change
nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pyops.checkpoint import load, save
from pyops.elastic import Callback, Elastic
from tests.elastic import networks
from tests.elastic.flat import make_elastic

pytestmark = pytest.mark.cpu_only

EPOCHS = 4


def layers() -> dict[str, nn.Module]:
    """blocks.1 and blocks.4 have no tensors."""
    return {**networks.layers(5), "blocks.1": nn.Tanh(), "blocks.4": nn.Tanh()}


def one_more(norms: Any, frozen: int) -> int:
    return min(frozen + 2, 3)


def trained(
    rank: int, group: Any, folder: str, stages: int
) -> tuple[list[float], list[tuple[int, int]]]:
    """Losses, and of each epoch (frozen, stages); the second and the last go on from a
    checkpoint."""
    losses, layouts = [], []

    def make() -> Elastic:
        return make_elastic(
            layers(),
            optimizer=networks.optimizer,
            loss=networks.loss,
            samples=networks.SAMPLES,
            batch=8,
            seed=5,
            policy=Callback(one_more),
            stages=stages,
            compress=False,
        )

    elastic = make()
    for epoch in range(EPOCHS):
        layouts.append((elastic.frozen, elastic.layout.stages))
        for share in elastic.shares():
            losses.append(
                elastic.step(
                    *networks.rows(share.samples), share=share, lr=networks.lr_of(share.step)
                ).loss
            )
        elastic.decide()
        if epoch in (0, 2):
            save(folder, elastic.state_dict())
            elastic.close()
            elastic = make()
            elastic.load_state_dict(load(folder)[0])
    elastic.close()
    return losses, layouts


def test_they_are_frozen_moved_and_loaded(world, tmp_path):
    alone, _ = trained(0, None, str(tmp_path / "alone"), 1)
    for losses, layouts in world(2).run(trained, str(tmp_path / "both"), 2):
        assert layouts == [(0, 2), (2, 2), (3, 2), (3, 2)]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-6, atol=1e-6)
    assert sum(alone[-4:]) < sum(alone[:4])
