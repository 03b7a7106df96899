"""The loss over a shared vocabulary on 1 to 4 ranks against float64 on one; what it sends; mistakes
of one rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm import Communicator
from pyops.comm.failure import DisagreementError
from pyops.flat import Placement
from pyops.tensor_parallel import vocab_parallel_cross_entropy
from tests.ops.layers.test_cross_entropy import plain
from tests.tensor_parallel.shared_layers import configured

pytestmark = pytest.mark.on_device

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
BOUND = {F64: 1e-12, F32: 1e-6, BF16: 2**-8, F16: 2**-11}
WORDS = 13  # 2, 3 and 4 ranks don't divide it: 7 6, 5 5 3, 4 4 4 1
LAYOUTS = ("padded", "padded more", "uneven", "all on the last")
OPTIONS = tuple(
    {"label_smoothing": s, "z_loss": z, "reduction": r}
    for s, z, r in ((0.0, 0.0, "mean"), (0.2, 0.0, "sum"), (0.0, 0.05, "none"), (0.2, 0.05, "mean"))
)


def weight_of(reduction: str) -> Any:
    return torch.linspace(-1, 1, 12, dtype=F64).view(2, 6) if reduction == "none" else 0.7


def whole_case(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    z = (3 * torch.randn(2, 6, WORDS, generator=generator, dtype=F64)).to(dtype)
    y = torch.randint(WORDS, (2, 6), generator=generator)
    y[0, 2] = y[1, 5] = -100
    return z, y


def part_of(z: Tensor, rank: int, ranks: int, layout: str) -> tuple[Tensor, dict[str, Any]]:
    """This rank's columns and the arguments that say which they are. Padding is nan: it must not
    count, whatever it is."""
    words = z.shape[-1]
    if layout.startswith("padded"):
        width = Placement.cut((words,), dim=0, rank=rank, ranks=ranks).length + (
            2 if layout == "padded more" else 0
        )
        whole = torch.cat(
            [z, z.new_full((*z.shape[:-1], ranks * width - words), torch.nan)], dim=-1
        )
        return whole[..., rank * width : (rank + 1) * width].clone(), {"vocab_size": words}
    inner = [1, 1, 6] if layout == "uneven" else [0, 0, 0]  # the second of four ranks holds nothing
    cuts = [0, *inner[3 - (ranks - 1) :], words]
    return z[..., cuts[rank] : cuts[rank + 1]].clone(), {
        "vocab_size": words,
        "first_column": cuts[rank],
    }


def on_rank(
    rank: int, group: dist.ProcessGroup | None, ranks: int, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor, bool]]:
    """For each layout and options: loss, gradient of this rank's logits, whether those were left
    alone."""
    found = []
    z, y = whole_case(dtype)
    for layout, options in itertools.product(LAYOUTS, OPTIONS):
        mine, place = part_of(z, rank, ranks, layout)
        leaf = mine.clone().requires_grad_()
        loss = configured(vocab_parallel_cross_entropy, leaf, y, group=group, **place, **options)
        (loss * weight_of(options["reduction"])).sum().backward()
        found.append(
            (loss.detach(), leaf.grad, torch.equal(leaf.detach().nan_to_num(), mine.nan_to_num()))
        )
    return found


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [*((n, d) for n in (1, 2, 3, 4) for d in (F64, F32)), (2, BF16), (2, F16)],
    ids=str,
)
def test_loss_and_gradient(world: Any, ranks: int, dtype: torch.dtype):
    results = world(ranks).run(on_rank, ranks, dtype) if ranks > 1 else [on_rank(0, None, 1, dtype)]
    z, y = whole_case(dtype)
    for i, (layout, options) in enumerate(itertools.product(LAYOUTS, OPTIONS)):
        leaf = z.double().clone().requires_grad_()
        expected = plain(leaf.view(-1, WORDS), y.view(-1), **options)
        weight = weight_of(options["reduction"])
        (expected * (weight if isinstance(weight, float) else weight.view(-1))).sum().backward()
        loss = results[0][i][0]
        assert all(torch.equal(loss, result[i][0]) for result in results), (
            "the ranks' losses differ"
        )
        assert loss.dtype == (F64 if dtype == F64 else F32)
        error = (loss.double().flatten() - expected.detach().flatten()).abs().max()
        assert error <= (1e-12 if dtype == F64 else 1e-6) * expected.abs().max()
        whole = torch.cat([result[i][1] for result in results], dim=-1).double()
        assert not whole[..., WORDS:].any(), f"padding has a gradient ({layout})"
        assert (whole[..., :WORDS] - leaf.grad).abs().max() <= BOUND[
            dtype
        ] * leaf.grad.abs().max(), (layout, options)
        assert leaf.grad.abs().max() > 0.01
        assert options["z_loss"] or whole.sum(-1).abs().max() < 4 * BOUND[dtype], (
            "a row of the gradient does not sum to zero"
        )
        assert all(result[i][2] for result in results), "the caller's logits were written to"


def bytes_on_rank(rank: int, group: dist.ProcessGroup, smoothing: float) -> tuple[int, int, int]:
    """Collectives and bytes of forward, collectives of backward."""
    z = torch.randn(50, 8, requires_grad=True)
    y = torch.zeros(50, dtype=torch.int64)
    comm = Communicator.of(group)
    vocab_parallel_cross_entropy(z, y, group=group)  # measures what is fastest, once
    calls, before = comm.sequence, comm.bytes_sent
    loss = configured(vocab_parallel_cross_entropy, z, y, group=group, label_smoothing=smoothing)
    forward, sent, calls = comm.sequence - calls, comm.bytes_sent - before, comm.sequence
    loss.backward()
    return forward, sent, comm.sequence - calls


@pytest.mark.parametrize(("smoothing", "each"), [(0.0, 12), (0.1, 16)])
def test_one_collective_of_12_bytes_a_token(world: Any, smoothing: float, each: int):
    assert world(2).run(bytes_on_rank, smoothing) == [(1, 51 * each, 0)] * 2


def extremes_on_rank(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Logits whose exponentials overflow; one rank's all -inf; a target that is -inf; all rows
    ignored."""
    generator = torch.Generator().manual_seed(3)
    huge = 1e3 * torch.randn(4, 6, generator=generator)
    lost = torch.randn(4, 6, generator=generator)
    lost[:, :3] = -torch.inf
    y = torch.tensor([0, 5, -100, 3])
    found = []
    for z, words in (
        (huge, y),
        (lost, torch.full((4,), 4)),
        (lost, torch.zeros(4).long()),
        (huge, torch.full((4,), -100)),
    ):
        for smoothing in (0.0, 0.1):
            leaf = z[:, 3 * rank : 3 * rank + 3].clone().requires_grad_()
            loss = configured(
                vocab_parallel_cross_entropy, leaf, words, group=group, label_smoothing=smoothing
            )
            loss.backward()
            reference = z.clone().requires_grad_()
            expected = plain(reference, words, label_smoothing=smoothing)
            expected.backward()
            mine = reference.grad[:, 3 * rank : 3 * rank + 3]
            if (words != -100).any():
                torch.testing.assert_close(leaf.grad, mine, rtol=1e-5, atol=1e-7, equal_nan=True)
            else:
                assert not leaf.grad.any()
            torch.testing.assert_close(loss, expected, equal_nan=True, rtol=1e-6, atol=1e-6)
            found.append(loss.detach())
    return found


def test_extremes(world: Any):
    found = world(2).run(extremes_on_rank)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*found, strict=True))


def in_place_on_rank(rank: int, group: dist.ProcessGroup) -> bool:
    x = torch.randn(5, 4, requires_grad=True)
    y = torch.arange(5)
    gradients = []
    for in_place in (False, True):
        logits = 2 * x
        before = logits.detach().clone()
        loss = vocab_parallel_cross_entropy(logits, y, group=group, in_place=in_place)
        gradients.append(torch.autograd.grad(loss, x)[0])
        assert torch.equal(before, logits) != in_place
    return torch.equal(*gradients) and bool(gradients[0].any())


def test_in_place(world: Any):
    assert all(world(2).run(in_place_on_rank))


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # what rank 1 does otherwise, what it raises, with which words
    "rows": ({"rows": 5}, DisagreementError, "equal shapes"),
    "targets of another shape": ({"targets": torch.zeros(5).long()}, ValueError, r"targets \(5,\)"),
    "a target that is no word": (
        {"targets": torch.tensor([0, 1, 99, 0])},
        ValueError,
        r"target 99 at \[2\] is no word .* of 8",
    ),
    "other targets": ({"targets": torch.tensor([0, 1, 2, 0])}, DisagreementError, "other targets"),
    "other smoothing": ({"label_smoothing": 0.1}, DisagreementError, "equal shapes"),
    "another z-loss": ({"z_loss": 0.1}, DisagreementError, "z_loss"),
    "a wrong dtype": ({"targets": torch.zeros(4)}, TypeError, "int64"),
    "no reduction": ({"reduction": "avg"}, ValueError, "choose one of"),
    "overlapping parts": (
        {"first_column": 3, "vocab_size": 8},
        DisagreementError,
        "rank 0: 0 to 4, rank 1: 3 to 7",
    ),
    "too few columns": (
        {"vocab_size": 9},
        ValueError,
        "4 columns on each of 2 ranks don't hold a vocabulary of 9",
    ),
}


def mistake_on_rank(rank: int, group: dist.ProcessGroup, name: str) -> tuple[str, str, float]:
    different = dict(MISTAKES[name][0]) if rank == 1 else {}
    z = torch.randn(different.pop("rows", 4), 4, requires_grad=True)
    y = different.pop(
        "targets", torch.tensor([0, 1, 2, 3]) if len(z) == 4 else torch.zeros(len(z)).long()
    )
    try:
        configured(vocab_parallel_cross_entropy, z, y, group=group, **different)
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    else:
        return "nothing", "", 0.0
    after = vocab_parallel_cross_entropy(torch.zeros(4, 4), torch.zeros(4).long(), group=group)
    return kind, text, float(after)


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", MISTAKES)
def test_one_ranks_mistake_is_raised_on_all(world: Any, name: str):
    _, kind, words = MISTAKES[name]
    results = world(2).run(mistake_on_rank, name)
    assert results[0][0] == "DisagreementError", results
    assert results[1][0] == kind.__name__, results
    assert (
        torch.tensor(0.0).new_tensor([r[2] for r in results]).allclose(torch.tensor(8.0).log())
    ), "the group is broken"
    with pytest.raises(kind, match=words):
        raise kind(results[1][1])


def test_refusals_on_one_rank():
    z, y = torch.zeros(2, 6, requires_grad=True), torch.zeros(2).long()
    for options, words in (
        ({"vocab_size": 7}, "6 columns on each of 1 ranks don't hold a vocabulary of 7"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"first_column": 2}, "first_column is 2 and vocab_size is None"),
        (
            {"first_column": 9, "vocab_size": 6},
            "first_column is 9; it must be from 0 to vocab_size = 6",
        ),
        ({"in_place": True}, "over a leaf tensor"),
    ):
        with pytest.raises(ValueError, match=words):
            configured(vocab_parallel_cross_entropy, z, y, **options)
