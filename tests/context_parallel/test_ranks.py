"""Over process groups: a mesh, disagreements, lost ranks, a loss of uneven counts."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops.comm import CommunicationError, DisagreementError
from pyops.context_parallel import ContextRanks, ContextRow, Order, token_mean
from pyops.data_parallel import DataParallel
from pyops.mesh import ALONE, Axes, Mesh
from pyops.ops.attention import AttentionMask, BlockLayout
from tests.context_parallel.rows import alone, on_rank, put_together
from tests.context_parallel.test_attention import CASES, compared
from tests.grids import full
from tests.workers import spawn_ranks

pytestmark = pytest.mark.cpu_only


def _over_a_group(rank: int, group: Any, teams: list[tuple[str, int | None]]) -> list[Any]:
    return [
        on_rank(group, CASES["everything"], method=method, heads=heads, order="zigzag")
        for method, heads in teams
    ]


def test_a_process_group_gives_what_one_process_does(world) -> None:
    teams = [("gather", None), ("ulysses", None), ("ring", None), ("ring", 2)]
    expected, found = alone(CASES["everything"]), world(4).run(_over_a_group, teams)
    for number, (method, _) in enumerate(teams):
        whole = put_together([each[number] for each in found])
        compared(whole, expected, bitwise=() if method == "ring" else ("y", "dq"))


def _refused(rank: int, group: Any) -> list[str]:
    """What differs between ranks, one after the other: all ranks raise, and go on."""
    ranks = ContextRanks.of(Mesh(Axes(cp=2)))
    ring = ContextRanks.of(group, method="ring")
    order = Order.of("zigzag", length=8, ranks=2)
    row = ContextRow(ranks, order)
    other = ContextRow(ranks, Order.of("contiguous", length=8, ranks=2))
    longer = ContextRow(ranks, Order.of("zigzag", length=12, ranks=2))
    x = torch.randn(1, 4, 2, 4)
    causal = AttentionMask(causal=True)
    documents = torch.zeros(1, 8, dtype=torch.int32)
    changed = documents.clone()
    changed[0, 5:] = rank
    calls = [
        lambda: row.attention(x, x, x, mask=AttentionMask(documents=changed)),
        lambda: (row if rank else ContextRow(ring, order)).attention(x, x, x, mask=causal),
        lambda: (row if rank else other).attention(x, x, x, mask=causal),
        lambda: row.attention(x, x, x, mask=causal if rank else None),
        lambda: row.attention(*[x.repeat(1 + rank, 1, 1, 1)] * 3, mask=causal),
        lambda: (longer if rank else row).attention(x, x, x, mask=causal),
        lambda: row.attention(x, x, x, mask=AttentionMask(documents=documents[:, : 8 - 4 * rank])),
    ]
    found = []
    for call in calls:
        with pytest.raises((DisagreementError, ValueError)) as caught:
            call()
        found.append(str(caught.value))
    assert row.attention(x, x, x, mask=causal).shape == x.shape
    return found


def test_what_differs_between_ranks_is_raised_on_all(world) -> None:
    words = [
        "documents is .* on rank 0, but .* on rank 1",
        r"method is ring \(heads 1\) on rank 0, but gather \(heads 1\) on rank 1",
        "the order is of 8 tokens",
        "causal is False on rank 0, but True on rank 1",
        r"the shape of q is \[1, 4, 2, 4\] on rank 0, but \[2, 4, 2, 4\] on rank 1",
        "q has 4 tokens, and a rank's part of 12 is 6",
        r"documents have the shape \[1, 4\]; give those of the whole row, \[1, 8\]",
    ]
    for found in world(2).run(_refused):
        for text, word in zip(found, words, strict=True):
            assert re.search(word, text), (word, text)


def _row(**options: Any) -> ContextRow:
    return ContextRow(ContextRanks.of(ALONE, **options), Order.of("zigzag", length=8, ranks=1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: _row(method="all"), "method is 'all'; choose one of gather, ulysses, ring"),
        (lambda x: _row(heads=2), "heads is 2, which does not divide 1 ranks"),
        (
            lambda x: _row().attention(x[:, :4], x[:, :4], x[:, :4]),
            "q has 4 tokens, and a rank's part of 8 is 8",
        ),
        (
            lambda x: _row().attention(x, x.repeat(1, 2, 1, 1), x.repeat(1, 2, 1, 1)),
            r"k has 16 tokens, and a rank's part of 8 is 8; .* ContextRow\(memory=\)",
        ),
        (
            lambda x: _row().attention(x, x, x, bias=torch.zeros(2, 4, 4)),
            r"a bias of shape \[2, 4, 4\]; it must be that of the whole row",
        ),
        (
            lambda x: _row().attention(
                x, x, x, mask=AttentionMask(places=(torch.arange(8), torch.arange(8)))
            ),
            "mask has places, which the order gives",
        ),
        (
            lambda x: _row().attention(
                x, x, x, mask=AttentionMask(keys=torch.ones(1, 4, dtype=torch.bool))
            ),
            r"mask.keys has the shape \[1, 4\]; give those of the whole row, \[1, 8\]",
        ),
        (
            lambda x: ContextRow(
                ContextRanks.of(ALONE), Order.of("zigzag", length=8, ranks=2)
            ).attention(x, x, x),
            "the order is for 2 ranks, and the group has 1",
        ),
    ],
)
def test_refusals_before_anything_is_sent(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(torch.randn(1, 8, 2, 4))


def _heads_and_layouts(rank: int, group: Any) -> list[str]:
    found = []
    x = torch.randn(1, 4, 2, 4)
    order = Order.of("contiguous", length=16, ranks=4)
    layout = BlockLayout.from_dense(
        torch.ones(1, 1, dtype=torch.bool), block=16, num_queries=16, num_keys=16
    )
    for method, mask in (("ulysses", None), ("gather", AttentionMask(layout=layout))):
        row = ContextRow(ContextRanks.of(group, method=method), order)
        with pytest.raises(ValueError) as caught:
            row.attention(x, x, x, mask=mask)
        found.append(str(caught.value))
    x = torch.randn(1, 4, 4, 4)
    row = ContextRow(ContextRanks.of(group, method="ulysses"), order)
    sparse, plain = (
        row.attention(x, x, x, mask=AttentionMask(layout=layout)),
        row.attention(x, x, x),
    )
    assert torch.equal(sparse, plain)
    part = torch.randn(1, 8, 2, 4)
    row = ContextRow(ContextRanks.of(group), Order.of("contiguous", length=32, ranks=4))
    with pytest.raises(ValueError) as caught:
        row.attention(part, part, part, mask=AttentionMask(layout=layout))
    return [*found, str(caught.value)]


def test_heads_and_layouts_that_do_not_fit(world) -> None:
    for heads, blocks, length in world(4).run(_heads_and_layouts):
        assert "2 heads can't be exchanged among 4 ranks; up to 2 of 4 can" in heads
        assert "ranks hold 4 queries each in stretches that are no blocks of 16" in blocks
        assert "the layout is for 16 queries and 16 keys; give that of the whole row, 32" in length


def _dies(rank: int, group: Any, how: str) -> str:
    row = ContextRow(ContextRanks.of(group, method="ring"), Order.of("zigzag", length=12, ranks=3))
    x = torch.randn(1, 4, 2, 4, requires_grad=True)
    y = row.attention(x, x, x, mask=AttentionMask(causal=True))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("victim", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    with pytest.raises(CommunicationError) as caught:
        y.sum().backward()
    if how == "stopped":  # once all others have heard, nobody waits for it
        store.set(f"heard {rank}", "")
        if rank == 0:
            store.wait(["heard 2"])
            os.kill(int(store.get("victim")), signal.SIGKILL)
    return str(caught.value)


@pytest.mark.parametrize("how", ["killed", full("stopped")])
def test_a_killed_or_stalled_rank_of_the_ring_is_named(how: str) -> None:
    for outcome in spawn_ranks(3, _dies, how, group_timeout=3.0, timeout=30.0):
        if outcome.rank != 1:
            assert outcome.error is None, outcome.error
            assert "attention over ranks failed because rank 1 died or stalled" in outcome.result


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(5, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _losses(rank: int, group: Any) -> tuple[list[float], torch.Tensor]:
    """Rows of tokens over dp 2 x cp 2, where one rank has no token that counts."""
    mesh = Mesh(Axes(dp=2, cp=2))
    both = mesh.group(("dp", "cp"))
    x, targets = _data()
    order = Order.of("zigzag", length=8, ranks=2)
    mine = slice(2 * mesh.rank("dp"), 2 * mesh.rank("dp") + 2)
    x = order.shard(x[mine], rank=mesh.rank("cp"))
    targets = order.shard(targets[mine], rank=mesh.rank("cp"))
    model = DataParallel(_Net(), mesh=mesh, reduction="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        logits = model(x)
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        loss = token_mean(total, (targets != -100).sum(), group=both)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, model.module.layer.weight.detach()


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4, 8, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (4, 8), generator=generator)
    targets[:2, :2] = targets[:2, 6:] = -100  # all of one rank's
    targets[3, 5] = -100
    return x, targets


def test_uneven_counts_give_the_loss_of_one_process(world) -> None:
    x, targets = _data()
    net = _Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    expected = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(net(x).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss))
    for losses, weight in world(4).run(_losses):
        assert losses == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(weight, net.layer.weight.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("total", "count", "words"),
    [
        (torch.zeros(2), 3, r"total has the shape \[2\]"),
        (torch.zeros(()), 0, "no token of any rank counts"),
    ],
)
def test_losses_that_are_none(total: torch.Tensor, count: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        token_mean(total, count, group=ALONE)
