"""What each rank keeps, and what it sends: counted, and compared with the formulas of the ZeRO
paper."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from pyops.comm.collectives.communicator import Communicator
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from pyops.zero.hooks.reduced_gradient import ReducedGradient
from tests.grids import cut

WIDTH, LAYERS = 256, 6
# Bytes of a parameter that every rank keeps, and that are shared out: 16-bit parameters, AdamW with
# float32 masters.
FORMULA = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}


# Tensors without memory of their own: the elements of a reduced gradient are in chunks, which
# count, and torch's tracers keep fake tensors in their caches.
WITHOUT_MEMORY = (ReducedGradient, FakeTensor)


def bytes_of_tensors() -> int:
    """Bytes of all storages that a tensor of this process keeps alive."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if (
            isinstance(found, torch.Tensor)
            and found.device.type == "cpu"
            and found.layout == torch.strided
            and not isinstance(found, WITHOUT_MEMORY)
        ):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16()


def _measure(rank: int, group: Any, stage: int, cls_name: str) -> tuple[float, float, int]:
    """(bytes per parameter just before the second step, bytes sent per parameter and step, number
    of parameters)."""
    before = bytes_of_tensors()
    net = model()
    numel = sum(p.numel() for p in net.parameters())
    cls = AdamW if cls_name == "AdamW" else torch.optim.AdamW
    optimizer = ZeroOptimizer(
        net, cls, ZeroConfig(stage=stage, bucket_bytes=200_000), group=group, lr=1e-3
    )
    x = torch.randn(4, WIDTH).bfloat16()

    def backward() -> None:
        net(x).square().mean().backward()

    backward()
    optimizer.step()
    backward()
    kept = bytes_of_tensors() - before - x.untyped_storage().nbytes()
    assert sum(optimizer.memory().values()) == pytest.approx(kept, rel=0.01)
    sent = 0
    if dist.get_world_size(group) > 1:
        comm = Communicator.of(group)
        start = comm.bytes_sent
        optimizer.step()
        backward()
        sent = comm.bytes_sent - start
    return kept / numel, sent / numel, numel


@pytest.mark.parametrize(
    ("size", "cls_name"),
    cut(
        itertools.product((1, 2, 3), ("AdamW", "torch.AdamW")),
        keep=[(1, "torch.AdamW"), (2, "AdamW"), (3, "torch.AdamW")],
    ),
)
def test_persistent_bytes_are_those_of_the_paper(world, size: int, cls_name: str):
    for stage, (everywhere, shared) in FORMULA.items():
        if cls_name == "torch.AdamW" and stage == 0:
            continue
        expected = everywhere + shared / size
        for kept, _, _ in world(size).run(_measure, stage, cls_name):
            assert kept == pytest.approx(expected, rel=0.03), (stage, size)


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_sends_no_more_than_an_all_reduce(world, size: int):
    for stage in (1, 2):
        for _, sent, _ in world(size).run(_measure, stage, "AdamW"):
            assert sent == pytest.approx(2 * 2 * (size - 1) / size, rel=0.02), (
                stage
            )  # two passes of 2 bytes
    # Three passes at stage 3, but the last layer of forward is the first of backward, and stays.
    for _, sent, _ in world(size).run(_measure, 3, "AdamW"):
        assert sent == pytest.approx((3 - 1 / LAYERS) * 2 * (size - 1) / size, rel=0.02)


def _whole_gradients(rank: int, group: Any, stage: int, bucket_bytes: int) -> int:
    """The most bytes of whole gradients that were alive at once in a backward."""
    net = model()
    optimizer = ZeroOptimizer(
        net, AdamW, ZeroConfig(stage=stage, bucket_bytes=bucket_bytes), group=group, lr=1e-3
    )
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        alive = sum(b.whole.nbytes for b in optimizer.gradients.buckets if b.whole is not None)
        most = max(most, alive)

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(look)
    for _ in range(2):
        net(torch.randn(4, WIDTH).bfloat16()).square().mean().backward()
        optimizer.step()
    return most


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_gradients_are_those_of_a_few_buckets_only(world, stage: int):
    layer = (WIDTH * WIDTH + WIDTH) * 2
    for most in world(2).run(_whole_gradients, stage, layer):
        assert (
            layer <= most <= 4 * layer * 1.02
        )  # one that is filled, two on their way, one that is being handed over


def _whole_parameters(rank: int, group: Any, overlap: bool) -> list[int]:
    """The most bytes of whole parameters at once: while it is made, in training, and in
    evaluation."""
    before = bytes_of_tensors()
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16()
    most = [0, 0, 0]
    phase = 0

    def look(*_: Any) -> None:
        most[phase] = max(most[phase], bytes_of_tensors() - before)

    def initialise(module: nn.Module) -> None:
        module.reset_parameters()
        look()

    optimizer = ZeroOptimizer(
        net,
        torch.optim.SGD,
        ZeroConfig(stage=3, overlap_grad_reduce=overlap, initialize=initialise),
        group=group,
        lr=1e-3,
    )
    most[0] -= sum(unit.flats[0].shard.nbytes for unit in optimizer.gathering.units if unit.flats)

    def look_at_units(*_: Any) -> None:
        units = optimizer.gathering.units
        most[phase] = max(
            most[phase], sum(f.nbytes for unit in units for f in unit.flats if f.is_whole)
        )

    for module in net:
        module.register_forward_hook(look_at_units)
        module.register_full_backward_hook(look_at_units)
    for _ in range(3):
        phase = 1
        net(torch.randn(4, WIDTH, requires_grad=True).bfloat16()).square().mean().backward()
        optimizer.step()
        look_at_units()
        phase = 2
        with torch.no_grad():
            net(torch.randn(4, WIDTH).bfloat16())
    return most


@pytest.mark.parametrize("overlap", [True, False])
def test_stage_3_never_holds_more_than_two_layers(world, overlap: bool):
    layer = (WIDTH * WIDTH + WIDTH) * 2
    for made, trained, evaluated in world(2).run(_whole_parameters, overlap):
        assert made <= 2 * layer, "made part by part"
        for most in (trained, evaluated):
            assert layer <= most <= (2 if overlap else 1) * layer * 1.02
