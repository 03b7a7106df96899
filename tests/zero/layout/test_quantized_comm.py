"""What travels as a codec's numbers and within a small group: same values on every rank, bytes
counted, training goes on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.eight_bit import FP8, Int8
from pyops.comm.compression.floats import BF16
from pyops.comm.compression.one_bit import OneBit
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import cut, full
from tests.zero.making import zero_optimizer

pytestmark = pytest.mark.on_device

WIDTH, LAYERS = 64, 6


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    ).to(dtype)


def small_group(group: Any, size: int) -> dist.ProcessGroup:
    """This rank's one of the groups of `size` ranks that follow each other; made by all ranks."""
    ranks = dist.get_world_size(group)
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
    return groups[dist.get_rank(group) // size]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, WIDTH, generator=generator), torch.randn(16, WIDTH, generator=generator)


def _gathered(
    rank: int, group: Any, codec: Codec, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], float]:
    """(what a rank computed with, exact values, bytes sent in one gather per byte of exact ones) of
    the first layer."""
    net = model(dtype)
    zero = ZeroOptimizer(
        net,
        AdamW,
        ZeroConfig(stage=3, gather_codec=codec, overlap_grad_reduce=False),
        group=group,
        lr=1e-2,
    )
    exact = [p.detach().clone() for p in model(dtype)[0].parameters()]
    shard = zero.gathering.units[1].flats[0].shard.clone()
    seen: list[Tensor] = []
    net[0][1].register_forward_hook(
        lambda *_: seen.extend(p.detach().clone() for p in net[0][0].parameters())
    )
    comm = Communicator.of(group)
    with torch.no_grad():
        net(torch.zeros(1, WIDTH, dtype=dtype))  # whatever is measured the first time
        seen.clear()
        before = comm.bytes_sent
        net(torch.zeros(1, WIDTH, dtype=dtype))
        sent = comm.bytes_sent - before
    assert torch.equal(zero.gathering.units[1].flats[0].shard, shard), (
        "the owner's copy stays exact"
    )
    with zero.whole_parameters():
        for p, q in zip(net[0].parameters(), exact, strict=True):
            assert torch.equal(p, q), "what is saved is exact"
        assert torch.equal(net[1][0].weight, model(dtype)[1][0].weight)
    size, whole = (
        dist.get_world_size(group),
        sum(p.numel() * p.element_size() for p in net.parameters()),
    )
    return seen, exact, sent / (whole * (size - 1) / size)


@pytest.mark.parametrize(
    ("codec", "dtype", "share"),
    [
        (Int8(), torch.bfloat16, 0.5),
        (Int8(), torch.float32, 0.25),
        (FP8(), torch.float32, 0.25),
        (BF16(), torch.float32, 0.5),
    ],
    ids=str,
)
def test_all_ranks_compute_with_the_same_dequantised_parameters(
    world, codec: Codec, dtype: torch.dtype, share: float
):
    found = world(3).run(_gathered, codec, dtype)
    for seen, exact, sent in found:
        assert len(seen) == 2
        for mine, first, right in zip(seen, found[0][0], exact, strict=True):
            assert torch.equal(mine, first), "the same bits on every rank"
            assert not torch.equal(mine, right), "a codec that does nothing proves nothing"
            largest = float(right.float().abs().max())
            bound = {"int8": 0.51 / 127, "fp8": 2.0**-4, "bf16": 2.0**-8}[codec.name.split("(")[0]]
            assert float((mine.float() - right.float()).abs().max()) <= largest * (bound + 2.0**-8)
        assert share <= sent <= share * 1.12  # scales of blocks, and a payload's end


def _bytes(zero: ZeroOptimizer, codec: Codec | None) -> int:
    """Bytes that one rank sends when every bucket's chunks go once to the others."""
    chunks = [
        (b.stop - b.start) // flat.partition.ranks
        for flat in zero.flats
        for b in flat.partition.buckets
    ]
    size = dist.get_world_size(zero.group)
    return sum(
        n * zero.flats[0].data.element_size() if codec is None else codec.payload_bytes(n)
        for n in chunks
    ) * (size - 1)


def _reduced(
    rank: int, group: Any, stage: int, codec: Codec | None, accumulate: int
) -> tuple[Tensor, int, list[int]]:
    """(this rank's chunks of the gradients, bytes sent for them in backward, those expected and of
    cards beside them)"""
    net = model(torch.float32)
    zero = ZeroOptimizer(
        net,
        AdamW,
        ZeroConfig(stage=stage, reduce_codec=codec, bucket_bytes=40_000),
        group=group,
        lr=1e-2,
    )
    comm = Communicator.of(group)
    net(batch(0, rank)[0]).square().mean().backward()  # whatever is measured the first time
    zero.zero_grad()
    before = comm.bytes_sent
    for step in range(accumulate):
        net(batch(step, rank)[0]).square().mean().backward()
    # Backward's and the next forwards' gathers, of blocks that were not whole.
    gathers = (
        0 if stage < 3 else (2 * accumulate * LAYERS - accumulate) * _bytes(zero, None) // LAYERS
    )
    sent = comm.bytes_sent - before - gathers
    cards = 64 * (dist.get_world_size(group) - 1) * len(zero.gradients.buckets)
    return (
        torch.cat(zero.reduced_gradients()),
        sent,
        [accumulate * _bytes(zero, codec), accumulate * cards],
    )


@pytest.mark.parametrize(
    ("accumulate", "stage"),  # what a second backward adds to is the same at stages 2 and 3
    cut(itertools.product((1, 2), (1, 2, 3)), keep=[(1, 3), (2, 1), (2, 2)]),
)
def test_gradients_are_summed_from_one_quantisation_of_each(world, stage: int, accumulate: int):
    exact = world(3).run(_reduced, stage, None, accumulate)
    found = world(3).run(_reduced, stage, Int8(), accumulate)
    for (chunks, sent, (payloads, cards)), (expected, plain, (whole, _)) in zip(
        found, exact, strict=True
    ):
        error = (chunks - expected).abs().max()
        assert 0 < error <= accumulate * expected.abs().max() / 127 * 2
        assert (chunks - expected).norm() < 0.02 * expected.norm()
        assert expected.norm() > 1e-3
        assert plain == whole
        assert payloads <= sent <= payloads + cards
        assert payloads < 0.27 * whole


def _payloads(zero: ZeroOptimizer) -> int:
    """Bytes that one rank sends in a gather of all blocks."""
    codec, size = zero.wire.gather, dist.get_world_size(zero.group)
    if codec is None:
        return _bytes(zero, None)
    return sum(-(-codec.payload_bytes(flat.shard.numel()) // 64) * 64 for flat in zero.flats) * (
        size - 1
    )


def _train(
    rank: int, group: Any, secondary: int, zero: dict[str, Any], accumulate: int, dtype: torch.dtype
) -> Any:
    """(parameters after a few steps, bytes sent in the last step in the group and in the small one,
    bytes of a gather)"""
    net, small = model(dtype), small_group(group, secondary) if secondary else None
    optimizer = zero_optimizer(
        net, AdamW, stage=3, secondary_group=small, group=group, lr=3e-3, **zero
    )
    comms = [Communicator.of(group), *([Communicator.of(small)] if small is not None else [])]
    sent: list[int] = []
    for step in range(4):
        before = [comm.bytes_sent for comm in comms]
        for part in range(accumulate):
            x, y = (t.to(dtype) for t in batch(accumulate * step + part, rank))
            nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        sent = [comm.bytes_sent - b for comm, b in zip(comms, before, strict=True)]
        assert all(
            flat.kept is None for unit in optimizer.gathering.units for flat in unit.flats
        ), "old values are forgotten"
    with optimizer.whole_parameters():
        numel = sum(flat.data.numel() for flat in optimizer.flats)
        return (
            [p.detach().clone() for p in net.parameters()],
            sent,
            _payloads(optimizer),
            numel * net[0][0].weight.element_size(),
        )


@pytest.mark.parametrize(
    ("zero", "accumulate"),
    [
        full({}, 2),
        full({}, 1),
        ({"overlap_grad_reduce": False}, 1),
        full({"overlap_grad_reduce": False}, 2),
        ({"gather_codec": Int8()}, 2),
        full({"gather_codec": Int8()}, 1),
    ],
    ids=str,
)
def test_a_small_group_gathers_for_backward_with_the_same_bits(
    world, zero: dict[str, Any], accumulate: int
):
    plain = world(4).run(_train, 0, zero, accumulate, torch.bfloat16)
    found = world(4).run(_train, 2, zero, accumulate, torch.bfloat16)
    for (parameters, sent, payloads, whole), (expected, before, _, _) in zip(
        found, plain, strict=True
    ):
        for a, b in zip(parameters, expected, strict=True):
            assert torch.equal(a, b)
        # Backward's gathers, and later forwards', leave the large group. The last block of forward
        # is backward's first.
        again = accumulate * (1 - 1 / LAYERS) + accumulate - 1
        assert before[0] - sent[0] == pytest.approx(again * payloads)
        assert sent[1] == pytest.approx(again * whole / 2)


def _loss(rank: int, group: Any, zero: dict[str, Any], secondary: int) -> list[float]:
    """The mean loss of all ranks at each of 50 steps of learning a fixed network's outputs."""
    net, teacher = model(torch.float32), model(torch.float32)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(1.5)
    small = small_group(group, secondary) if secondary else None
    optimizer = zero_optimizer(
        net, AdamW, stage=3, secondary_group=small, group=group, lr=3e-3, **zero
    )
    losses = []
    for step in range(50):
        x, _ = batch(step, rank)
        loss = nn.functional.mse_loss(net(x), teacher(x).detach())
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        losses.append(float(total) / dist.get_world_size(group))
    return losses


@pytest.mark.full  # hundreds of steps of four ranks; the tests above hold the bits
def test_training_in_few_bits_learns_as_well(world):
    exact = world(4).run(_loss, {}, 0)[0]
    coded = world(4).run(_loss, {"gather_codec": Int8(), "reduce_codec": Int8()}, 2)[0]
    assert exact[-1] < 0.5 * exact[0], "nothing was learnt"
    assert coded != exact
    assert sum(coded[-5:]) < 1.1 * sum(exact[-5:])


def _overflow(rank: int, group: Any) -> bool:
    net = model(torch.float32)
    zero = ZeroOptimizer(
        net,
        AdamW,
        ZeroConfig(stage=3, gather_codec=Int8(), reduce_codec=Int8(), max_grad_norm=1.0),
        group=group,
        lr=1e-2,
    )
    with zero.whole_parameters():
        before = [p.detach().clone() for p in net.parameters()]
    (net(batch(0, rank)[0]).square().mean() * (float("inf") if rank == 1 else 1.0)).backward()
    zero.step()
    with zero.whole_parameters():
        return all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(world):
    assert world(2).run(_overflow) == [True, True]


def _refused(rank: int, group: Any, case: str) -> str:
    zero: dict[str, Any] = {"stage": 3}
    if case == "stage":
        zero = {"stage": 2, "gather_codec": Int8()}
    elif case == "stage 0":
        zero = {"stage": 0, "reduce_codec": Int8()}
    elif case == "class":
        zero["gather_codec"] = Int8
    elif case == "onebit":
        zero["reduce_codec"] = OneBit()
    elif case == "random":
        zero["gather_codec"] = Int8(stochastic_rounding=True)
    elif case == "differ":
        zero["reduce_codec"] = Int8(block=64) if rank else Int8()
    elif case == "small group of stage 2":
        zero = {"stage": 2, "secondary_group": group}
    elif case == "no group":
        zero["secondary_group"] = 2
    elif case == "one has none":
        small = small_group(group, 1)
        zero["secondary_group"] = None if rank else small
    net = model()
    start = net[0][0].weight.data_ptr()
    try:
        zero_optimizer(net, AdamW, group=group, lr=1e-3, **zero)
    except (TypeError, ValueError) as error:
        assert net[0][0].weight.data_ptr() == start, "nothing is changed"
        return str(error)
    return ""


REFUSED = {
    "stage": "gather_codec has no meaning at stage 2",
    "stage 0": "reduce_codec has no meaning at stage 0", "class": "gather_codec is <class",
    "onebit": "reduce_codec is OneBit", "random": "rounds at random",
    "differ": "reduce_codec is Int8(block=256",
    "small group of stage 2": "secondary_group has no meaning at stage 2",
    "no group": "secondary_group is 2", "one has none": "must divide the ranks",
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_on_every_rank(world, case: str):
    for said in world(2).run(_refused, case):
        assert REFUSED[case] in said
