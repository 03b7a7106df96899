"""The last layer and the loss in one, on 1 to 4 ranks, against float64 and plain layers; what it
holds and what it sends."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pyops.comm import Communicator
from pyops.comm.failure import DisagreementError
from pyops.flat import Placement
from pyops.tensor_parallel import (
    LinearCrossEntropyConfig,
    accumulate_weight_gradient,
    linear_cross_entropy,
)
from tests.ops.layers.test_cross_entropy import plain
from tests.tensor_parallel.shared_layers import configured
from tests.tolerance import assert_close_to_reference

pytestmark = pytest.mark.on_device

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
WORDS, WIDTH = 13, 6
OPTIONS = tuple(
    {"label_smoothing": s, "z_loss": z, "reduction": r, "chunk_tokens": c}
    for s, z, r, c in (
        (0.0, 0.0, "mean", None),
        (0.2, 0.0, "sum", 5),
        (0.0, 0.05, "none", 5),
        (0.2, 0.05, "mean", 1),
        (0.1, 0.02, "none", 99),
    )
)


def case(dtype: torch.dtype) -> dict[str, Tensor]:
    """hidden [2, 6, WIDTH], weight, bias and targets, of which two are ignored."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"hidden": (2, 6, WIDTH), "weight": (WORDS, WIDTH), "bias": (WORDS,)}
    found = {
        name: torch.randn(shape, generator=generator, dtype=F64).to(dtype)
        for name, shape in shapes.items()
    }
    found["targets"] = torch.randint(WORDS, (2, 6), generator=generator)
    found["targets"][0, 2] = found["targets"][1, 5] = -100
    return found


def upstream(reduction: str) -> Any:
    return torch.linspace(-1, 1, 12, dtype=F64).view(2, 6) if reduction == "none" else 0.7


def expected(
    whole: dict[str, Tensor], options: dict[str, Any], *, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Loss and gradients of the plain layers computed in `dtype`."""
    options = {name: value for name, value in options.items() if name != "chunk_tokens"}
    leaves = [
        whole[name].to(dtype).clone().requires_grad_() for name in ("hidden", "weight", "bias")
    ]
    logits = functional.linear(*leaves).view(-1, WORDS)
    loss = plain(logits if dtype == F64 else logits.float(), whole["targets"].view(-1), **options)
    loss = loss.view(2, 6) if options["reduction"] == "none" else loss
    (loss * upstream(options["reduction"])).sum().backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)


def on_rank(
    rank: int, group: dist.ProcessGroup | None, ranks: int, dtype: torch.dtype
) -> list[tuple[Tensor, ...]]:
    """For each of OPTIONS: loss and this rank's gradients of hidden, weight and bias."""
    whole, found = case(dtype), []
    for options in OPTIONS:
        place = Placement.cut((WORDS, WIDTH), dim=0, rank=rank, ranks=ranks)
        cut = Placement.cut((WORDS,), dim=0, rank=rank, ranks=ranks)
        hidden = whole["hidden"].clone().requires_grad_()
        weight, bias = (
            place.take(whole["weight"]).requires_grad_(),
            cut.take(whole["bias"]).requires_grad_(),
        )
        loss = configured(
            linear_cross_entropy,
            hidden,
            weight,
            whole["targets"],
            bias=bias,
            group=group,
            vocab_size=WORDS,
            **options,
        )
        (loss * upstream(options["reduction"])).sum().backward()
        assert not weight.grad[place.stop - place.start :].any(), "padding has a gradient"
        found.append((loss.detach(), hidden.grad, place.part(weight.grad), cut.part(bias.grad)))
    return found


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [*((n, d) for n in (1, 2, 3, 4) for d in (F64, F32)), (1, F16), (2, BF16)],
    ids=str,
)
def test_loss_and_gradients(world: Any, ranks: int, dtype: torch.dtype):
    results = world(ranks).run(on_rank, ranks, dtype) if ranks > 1 else [on_rank(0, None, 1, dtype)]
    for i, options in enumerate(OPTIONS):
        reference, theirs = (expected(case(dtype), options, dtype=d) for d in (F64, dtype))
        for j in (0, 1):
            assert all(torch.equal(results[0][i][j], result[i][j]) for result in results), (
                "the ranks differ"
            )
        ours = [
            results[0][i][0],
            results[0][i][1],
            *(torch.cat([r[i][j] for r in results]) for j in (2, 3)),
        ]
        for a, p, r in zip(ours, theirs, reference, strict=True):
            largest = float(r.abs().max())
            assert largest > 0.01
            if dtype in (F64, F32):
                assert (a.double() - r).abs().max() <= {F64: 1e-12, F32: 1e-6}[dtype] * largest
            # rounded to 16 bits where plain torch does, and once more by the loss's own gradient
            else:
                worst = (p.double() - r).abs().max() + torch.finfo(dtype).eps * largest
                assert (a.double() - r).abs().max() <= 1.5 * worst


def leaves(
    dtype: torch.dtype = F32, *, tokens: int = 9, words: int = 40
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.randint(words, (tokens,))
    return (
        torch.randn(tokens, 8, dtype=dtype, requires_grad=True),
        torch.randn(words, 8, dtype=dtype, requires_grad=True),
        y,
    )


def test_what_needs_no_gradient_gets_none():
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += str(func).split(".")[1] in ("mm", "addmm", "addmm_")
            return func(*args, **(kwargs or {}))

    for trains_hidden, trains_weight, products in (
        (True, True, 3),
        (True, False, 2),
        (False, True, 2),
        (False, False, 1),
    ):
        h, w, y = leaves()
        h.requires_grad_(trains_hidden), w.requires_grad_(trains_weight)
        with Products() as mode:
            loss = linear_cross_entropy(h, w, y)
            if loss.requires_grad:
                loss.backward()
        assert mode.count == products
        assert (h.grad is not None, w.grad is not None) == (trains_hidden, trains_weight)
    h, w, y = leaves()
    with torch.no_grad(), Products() as mode:
        assert not linear_cross_entropy(h, w, y).requires_grad
    assert mode.count == 1


def test_logits_are_never_whole():
    """The largest tensor that is made is a chunk's logits, or the weight's gradient."""

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                self.numel = max(self.numel, t.numel() if isinstance(t, Tensor) else 0)
            return out

    for reduction in ("mean", "none"):
        h, w, y = leaves(tokens=400, words=700)
        with Largest() as mode:
            configured(
                linear_cross_entropy, h, w, y, chunk_tokens=40, reduction=reduction
            ).sum().backward()
        assert mode.numel == 40 * 700
        assert w.grad is not None
        assert w.grad.any()


def test_weight_gradients_of_chunks_add_up_in_fp32():
    """200 chunks in bf16: summed in bf16, their roundings would be seen."""
    h, w, y = leaves(BF16, tokens=200, words=30)
    configured(linear_cross_entropy, h, w, y, chunk_tokens=1, reduction="sum").backward()
    gradients = []
    for dtype in (F64, BF16):
        a, b = h.detach().to(dtype), w.detach().to(dtype).requires_grad_()
        functional.cross_entropy(functional.linear(a, b), y, reduction="sum").backward()
        gradients.append(b.grad)
    error, plain_error = ((g.double() - gradients[0]).abs().max() for g in (w.grad, gradients[1]))
    assert error <= 1.5 * plain_error
    assert w.grad.abs().max() > 1


def test_main_grad_is_added_to_and_grad_stays_none():
    for dtype, reduction in itertools.product((F32, BF16), ("mean", "none")):
        h, w, y = leaves(dtype)
        linear_cross_entropy(h, w, y, reduction=reduction).sum().backward()
        other = w.detach().clone().requires_grad_()
        other.main_grad = torch.full(w.shape, 2.0)
        for _ in range(2):
            linear_cross_entropy(h.detach(), other, y, reduction=reduction).sum().backward()
        assert other.grad is None
        rtol = 2**-7 if dtype == BF16 else 1e-5
        torch.testing.assert_close(
            other.main_grad,
            2 + 2 * w.grad.float(),
            rtol=rtol,
            atol=rtol * float(w.grad.abs().max()),
        )


def test_a_tied_weight_gets_both_gradients():
    _, w, y = leaves()
    tokens, gradients = torch.randint(40, (9,)), []
    for loss in (linear_cross_entropy, lambda h, w, y: functional.cross_entropy(h @ w.t(), y)):
        leaf = w.detach().clone().requires_grad_()
        loss(functional.embedding(tokens, leaf), leaf, y).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0.01


def test_a_loss_scale_beyond_fp16():
    """The factor 2^17 is inf in fp16, its product with a gradient is not."""
    h, w, y = leaves(F16, tokens=64)
    w = (w.detach() * 2**-10).requires_grad_(False)
    (linear_cross_entropy(h, w, y, reduction="sum") * 2.0**17).backward()
    reference = h.detach().double().requires_grad_()
    (functional.cross_entropy(reference @ w.double().t(), y, reduction="sum") * 2.0**17).backward()
    largest = float(reference.grad.abs().max())
    assert largest > 100
    torch.testing.assert_close(h.grad.double(), reference.grad, rtol=1e-2, atol=1e-2 * largest)


def test_all_rows_ignored():
    h, w, y = leaves()
    loss = linear_cross_entropy(h, w, y.fill_(-100))
    loss.backward()
    assert loss.isnan()
    assert not h.grad.any()
    assert not w.grad.any()


def test_no_tokens():
    for reduction in ("sum", "none"):
        h, w, y = leaves(tokens=0)
        loss = linear_cross_entropy(h, w, y, reduction=reduction)
        loss.sum().backward()
        assert loss.sum() == 0
        assert w.grad is not None
        assert not w.grad.any()


def test_a_second_backward_is_refused():
    h, w, y = leaves()
    loss = linear_cross_entropy(h, w, y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.cpu_only
def test_autocast_and_compile():
    h, w, y = leaves()
    with torch.autocast("cpu", BF16):
        loss = linear_cross_entropy(h, w, y)
    loss.backward()
    assert loss.dtype == h.grad.dtype == w.grad.dtype == F32
    bf16 = [t.detach().to(BF16).requires_grad_() for t in (h, w)]
    linear_cross_entropy(*bf16, y).backward()
    assert torch.equal(w.grad.bfloat16(), bf16[1].grad)
    gradients = []
    for function in (
        linear_cross_entropy,
        torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager"),
    ):
        leaf = w.detach().clone().requires_grad_()
        config = LinearCrossEntropyConfig(chunk_tokens=4, label_smoothing=0.1)
        function(h, leaf, y, config=config).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0.01


def traffic_on_rank(rank: int, group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Collectives and bytes of forward, and of backward."""
    comm, found = Communicator.of(group), []
    for reduce_hidden in (True, True, False):  # the first measures which algorithm is fastest
        h, w, y = leaves(tokens=20, words=8)
        before = comm.sequence, comm.bytes_sent
        loss = configured(
            linear_cross_entropy,
            h,
            w,
            y.clamp(max=7),
            group=group,
            chunk_tokens=10,
            reduce_hidden=reduce_hidden,
        )
        middle = comm.sequence, comm.bytes_sent
        loss.backward()
        found += [tuple(b - a for a, b in zip(before, middle, strict=True))]
        assert comm.sequence == middle[0], "backward communicates"
    return found[1:]


def test_collectives(world: Any):
    """Two chunks of 10 tokens: (10 + 1) 12 bytes each, and of hidden's gradient the other rank's
    half twice, 20 8 4 / 2 2."""
    statistics, hidden = 2 * 11 * 12, 20 * 8 * 4
    assert world(2).run(traffic_on_rank) == [[(4, statistics + hidden), (2, statistics)]] * 2


def parts_on_rank(rank: int, group: dist.ProcessGroup) -> Tensor:
    """With reduce_hidden=False: this rank's part of hidden's gradient."""
    whole = case(F64)
    hidden = whole["hidden"].requires_grad_()
    weight = whole["weight"][:12].tensor_split(2)[rank].clone().requires_grad_()
    configured(
        linear_cross_entropy,
        hidden,
        weight,
        whole["targets"].clamp(max=11),
        group=group,
        reduce_hidden=False,
    ).backward()
    return hidden.grad


def test_a_region_may_sum_the_gradient_of_hidden(world: Any):
    whole = case(F64)
    hidden = whole["hidden"].requires_grad_()
    linear_cross_entropy(hidden, whole["weight"][:12], whole["targets"].clamp(max=11)).backward()
    parts = world(2).run(parts_on_rank)
    torch.testing.assert_close(parts[0] + parts[1], hidden.grad)
    assert not torch.allclose(parts[0], hidden.grad, rtol=0.01, atol=0.001)


def mistake_on_rank(rank: int, group: dist.ProcessGroup, wrong: dict[str, Any]) -> tuple[str, str]:
    h, w, y = torch.zeros(4, 8), torch.zeros(5, 8), torch.zeros(4).long()
    arguments: dict[str, Any] = {"hidden": h, "weight": w, "targets": y} | (
        wrong if rank == 1 else {}
    )
    try:
        configured(linear_cross_entropy, group=group, **arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ({"weight": torch.zeros(5, 7)}, ValueError, r"needs weight \[C, H\]"),
        (
            {"weight": torch.zeros(5, 8).half()},
            ValueError,
            "weight and bias must be so too, got torch.float16",
        ),
        (
            {"bias": torch.zeros(4)},
            ValueError,
            r"bias \[C\] or None; got \(4, 8\), \(5, 8\) and \(4,\)",
        ),
        (
            {"targets": torch.full((4,), 10)},
            ValueError,
            "target 10 at .* is no word of a vocabulary of 10",
        ),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens is 0"),
        ({"chunk_tokens": 3}, DisagreementError, "equal shapes"),
        ({"targets": torch.ones(4).long()}, DisagreementError, "other targets"),
    ],
    ids=str,
)
def test_one_ranks_mistake_is_raised_on_all(
    world: Any, wrong: dict[str, Any], kind: type[Exception], words: str
):
    results = world(2).run(mistake_on_rank, wrong)
    assert results[0][0] == "DisagreementError"
    assert results[1][0] == kind.__name__
    with pytest.raises(kind, match=words):
        raise kind(results[1][1])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_accumulate_weight_gradient(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "pyops.deferred.gradients.BLOCK_BYTES", 4 * 70 * 16
    )  # 16 rows of main_grad at a time
    dy, x = torch.randn(70, 50).to(dtype), torch.randn(70, 9).to(dtype)
    main = torch.randn(50, 9)
    reference = main.double() + dy.double().t() @ x.double()
    exact = main + dy.float().t() @ x.float()
    accumulate_weight_gradient(main, dy, x)
    assert_close_to_reference(
        main, exact, reference, tiny=4 * torch.finfo(F32).eps * float(reference.abs().max())
    )


def test_accumulate_weight_gradient_refuses():
    with pytest.raises(ValueError, match=r"main_grad \(3, 2\) must be \[out, in\]"):
        accumulate_weight_gradient(torch.zeros(3, 2), torch.zeros(5, 2), torch.zeros(5, 2))
    with pytest.raises(ValueError, match="float32 or float64, dy and x of one dtype; got"):
        accumulate_weight_gradient(
            torch.zeros(2, 2).bfloat16(), torch.zeros(5, 2), torch.zeros(5, 2)
        )
