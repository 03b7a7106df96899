"""An elastic run on the device under test: freezing, changes and a cache, with the losses of a
plain run on the CPU."""

from __future__ import annotations

import torch

from pyops.elastic import Bound, CacheOptions
from tests.elastic import networks
from tests.elastic.flat import make_elastic

BLOCKS, EPOCHS, BATCH = 6, 4, 8


def test_freezing_with_a_cache_on_the_device(device):
    def rows(samples):
        x, y = networks.rows(samples)
        return x.to(device), y.to(device)

    elastic = make_elastic(
        {name: layer.to(device) for name, layer in networks.layers(BLOCKS).items()},
        optimizer=networks.optimizer,
        loss=networks.loss,
        samples=networks.SAMPLES,
        batch=BATCH,
        seed=5,
        policy=Bound(1 / 3),
        max_grad_norm=0.5,
        device=device,
        cache=CacheOptions("on", example=lambda samples: (rows(samples)[0], {})),
    )
    losses, frozen = [], []
    for _ in range(EPOCHS):
        frozen.append(elastic.frozen)
        for share in elastic.shares():
            losses.append(
                elastic.step(*rows(share.samples), share=share, lr=networks.lr_of(share.step)).loss
            )
        elastic.decide()
    assert elastic.is_cached
    for state in elastic.states().values():
        assert all(tensor.device.type == device.type for tensor in state["parameters"].values())
    elastic.close()
    wanted, _, _, depths = networks.plain(BLOCKS, epochs=EPOCHS, batch=BATCH, policy=Bound(1 / 3))
    assert frozen == depths
    assert max(depths) > 2
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-4, atol=1e-4)
