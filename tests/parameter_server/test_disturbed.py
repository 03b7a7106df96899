"""Runs whose replicas die and are replaced end as well as undisturbed ones do."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from pyops.parameter_server import DownpourConfig, ShardConfig, VirtualTime, VirtualWorker
from tests.parameter_server.replicas import adagrad, gradient, mean_loss, model, uneven

pytestmark = pytest.mark.cpu_only
STEPS, REPLICAS = 40, 4


def of_four(module: nn.Module, worker: int, step: int) -> None:
    """A replacement, 4 or more, computes on the samples of the replica that it replaces."""
    gradient(module, worker % REPLICAS, step % 20)


def final_loss(seed: int, *, deaths: int = 0) -> float:
    """The loss over all samples after 160 pushes and what replicas that died had done."""
    drawn = random.Random(seed)
    workers = uneven(REPLICAS, steps=STEPS, seed=seed)
    for number in range(deaths):
        dies = drawn.uniform(2.0, 20.0)
        slow = workers[number]
        left = STEPS - int(dies)
        workers[number] = VirtualWorker(slow.seconds, latency=0.02, dies=dies, steps=STEPS)
        workers.append(VirtualWorker(slow.seconds, latency=0.02, starts=dies, steps=left))
    run = VirtualTime(
        model,
        of_four,
        adagrad(0.05),
        workers,
        config=DownpourConfig(),
        shards=2,
        shard_config=ShardConfig(max_staleness=8),
    ).run()
    assert all(shard.counts.lost_members == deaths for shard in run.shards)
    ended = model()
    values = run.parameters()
    with torch.no_grad():
        for name, parameter in ended.named_parameters():
            parameter.copy_(values[run.layout.slice(name)].view(parameter.shape))
    return mean_loss(ended)


@pytest.mark.full  # a measurement; what is refused and dropped: test_virtual_time.py
def test_losses_of_disturbed_runs_lie_within_the_spread_of_undisturbed_seeds():
    calm = [final_loss(seed) for seed in range(6)]
    disturbed = [final_loss(seed, deaths=2) for seed in range(6, 12)]
    assert max(calm) < 0.9 * mean_loss(model())  # they have learned something
    assert min(calm) <= sum(disturbed) / len(disturbed) <= max(calm), (calm, disturbed)
