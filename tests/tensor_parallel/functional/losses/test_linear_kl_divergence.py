"""The divergence of a student from a teacher after their last layers, on 1 to 4 ranks, against
autograd in float64 of whole logits; what it holds and what it sends."""

from __future__ import annotations

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
from pyops.mesh import ALONE
from pyops.tensor_parallel import (
    DivergenceConfig,
    LinearCrossEntropyConfig,
    LinearLogits,
    linear_cross_entropy,
    linear_kl_divergence,
)
from pyops.tensor_parallel.functional.losses.linear_kl_divergence import (
    DivergenceSums,
    _chunk_size,
)
from pyops.tensor_parallel.functional.losses.vocabulary_part import VocabularyPart
from pyops.tensor_parallel.functional.ranks import Ranks
from tests.grids import full

pytestmark = pytest.mark.on_device

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
WORDS, WIDTH, TEACHER_WIDTH = 13, 6, 9
OPTIONS: tuple[dict[str, Any], ...] = (
    {"kind": "forward"},
    {"kind": "forward", "temperature": 2.0, "hard": 0.25, "chunk_tokens": 5},
    {"kind": "reverse", "temperature": 0.5, "chunk_tokens": 1},
    {"kind": "reverse", "temperature": 8.0, "hard": 0.5},
    {"kind": "jsd", "b": 0.1, "temperature": 2.0, "chunk_tokens": 7},
    {"kind": "jsd", "b": 0.5, "hard": 0.75},
    {"kind": "squared", "chunk_tokens": 5},
    {"kind": "forward", "hard": 1.0, "chunk_tokens": 5},
)


def case(dtype: torch.dtype, *, scale: float = 1.0) -> dict[str, Tensor]:
    """Hidden states [2, 6, ...], weights and biases of both, and targets, of which two do not
    count."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "hidden": (2, 6, WIDTH),
        "weight": (WORDS, WIDTH),
        "bias": (WORDS,),
        "teacher_hidden": (2, 6, TEACHER_WIDTH),
        "teacher_weight": (WORDS, TEACHER_WIDTH),
        "teacher_bias": (WORDS,),
    }
    found = {
        name: (scale * torch.randn(shape, generator=generator, dtype=F64)).to(dtype)
        for name, shape in shapes.items()
    }
    found["targets"] = torch.randint(WORDS, (2, 6), generator=generator)
    found["targets"][0, 2] = found["targets"][1, 5] = -100
    return found


def soft_rows(z: Tensor, y: Tensor, options: dict[str, Any]) -> Tensor:
    """[N], each token's divergence by the formulas, of whole logits."""
    temperature, kind = options.get("temperature", 1.0), options["kind"]
    if kind == "squared":
        return (z - y).square().sum(-1) / 2
    log_q, log_p = (functional.log_softmax(x / temperature, -1) for x in (z, y))
    if kind == "jsd":
        b = options.get("b", 0.5)
        log_m = (b * log_p.exp() + (1 - b) * log_q.exp()).log()
        of_p = (log_p.exp() * (log_p - log_m)).sum(-1)
        of_q = (log_q.exp() * (log_q - log_m)).sum(-1)
        return temperature**2 * (b * of_p + (1 - b) * of_q)
    first, second = (log_p, log_q) if kind == "forward" else (log_q, log_p)
    return temperature**2 * (first.exp() * (first - second)).sum(-1)


def expected(whole: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Mean loss and the student's gradients by autograd in float64."""
    leaves = [whole[n].double().clone().requires_grad_() for n in ("hidden", "weight", "bias")]
    z = functional.linear(*leaves).view(-1, WORDS)
    teacher = (whole[f"teacher_{n}"].double() for n in ("hidden", "weight", "bias"))
    y = functional.linear(*teacher).view(-1, WORDS)
    targets, hard = whole["targets"].view(-1), options.get("hard", 0.0)
    counts = targets != -100
    loss = (1 - hard) * soft_rows(z, y, options)[counts].mean()
    if hard:
        loss = loss + hard * functional.cross_entropy(z, targets)
    (0.7 * loss).backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)


def on_rank(
    rank: int, group: dist.ProcessGroup | None, ranks: int, dtype: torch.dtype
) -> list[tuple[Tensor, ...]]:
    """For each of OPTIONS: loss and this rank's gradients of hidden, weight and bias. The rows of
    padding hold what would be seen if they counted."""
    whole, found = case(dtype), []
    for options in OPTIONS:
        cuts = {
            name: Placement.cut(whole[name].shape, dim=0, rank=rank, ranks=ranks)
            for name in ("weight", "bias", "teacher_weight", "teacher_bias")
        }
        own = {name: cut.take(whole[name]) for name, cut in cuts.items()}
        for name, x in own.items():
            x[cuts[name].stop - cuts[name].start :] = 50.0
        hidden = whole["hidden"].clone().requires_grad_()
        student = LinearLogits(hidden, own["weight"].requires_grad_(), own["bias"].requires_grad_())
        loss = linear_kl_divergence(
            student,
            LinearLogits(whole["teacher_hidden"], own["teacher_weight"], own["teacher_bias"]),
            whole["targets"],
            group=ALONE if group is None else group,
            config=DivergenceConfig(vocab_size=WORDS, **options),
        )
        (0.7 * loss).backward()
        gradients = [hidden.grad]
        for name in ("weight", "bias"):
            gradient = own[name].grad
            assert not gradient[cuts[name].stop - cuts[name].start :].any(), "padding has one"
            gradients.append(cuts[name].part(gradient))
        found.append((loss.detach(), *gradients))
    return found


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [*((n, F64) for n in (1, 3, 4)), full(2, F64), full(1, F32), (2, F32), (2, BF16)],
    ids=str,
)
def test_loss_and_gradients(world: Any, ranks: int, dtype: torch.dtype):
    results = world(ranks).run(on_rank, ranks, dtype) if ranks > 1 else [on_rank(0, None, 1, dtype)]
    for i, options in enumerate(OPTIONS):
        for j in (0, 1):
            assert all(torch.equal(results[0][i][j], result[i][j]) for result in results), (
                "the ranks differ"
            )
        ours = [
            results[0][i][0],
            results[0][i][1],
            *(torch.cat([r[i][j] for r in results]) for j in (2, 3)),
        ]
        for a, reference in zip(ours, expected(case(dtype), options), strict=True):
            largest = float(reference.abs().max())
            assert largest > 1e-3
            bound = {F64: 1e-12, F32: 2e-6, BF16: 0.02}[dtype]
            assert (a.double() - reference).abs().max() <= bound * largest, options


def alone(whole: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    """Loss and gradients in one process."""
    leaves = [whole[n].clone().requires_grad_() for n in ("hidden", "weight", "bias")]
    teacher = LinearLogits(*(whole[f"teacher_{n}"] for n in ("hidden", "weight", "bias")))
    loss = linear_kl_divergence(
        LinearLogits(*leaves),
        teacher,
        whole["targets"],
        group=ALONE,
        config=DivergenceConfig(**options),
    )
    loss.backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 8.0])
def test_logits_a_thousand_times_as_large(kind: str, temperature: float):
    whole = case(F64)
    for name in ("hidden", "bias", "teacher_hidden", "teacher_bias"):
        whole[name] *= 1000
    options = {"kind": kind, "temperature": temperature}
    found = alone(whole, **options)
    assert all(x.isfinite().all() for x in found)
    if kind == "jsd":  # whose formula takes the logarithm of a sum that underflows
        assert 0 < found[0] <= temperature**2 * 0.6932
        return
    leaves = [whole[n].clone().requires_grad_() for n in ("hidden", "weight", "bias")]
    z = functional.linear(*leaves).view(-1, WORDS)
    y = functional.linear(*(whole[f"teacher_{n}"] for n in ("hidden", "weight", "bias")))
    counts = whole["targets"].view(-1) != -100
    loss = soft_rows(z, y.view(-1, WORDS), options)[counts].mean()
    loss.backward()
    assert (found[0] - loss).abs() <= 1e-11 * loss
    for a, leaf in zip(found[1:], leaves, strict=True):
        assert (a - leaf.grad).abs().max() <= 1e-11 * max(1e-300, float(leaf.grad.abs().max()))


@pytest.mark.parametrize("b", [0.0, 1.0])
def test_a_mixture_of_one_side_alone(b: float):
    """Where b is 0 or 1 the mixture is one of both, and the formula gives zero."""
    loss, *gradients = alone(case(F64), kind="jsd", b=b)
    assert abs(float(loss)) < 1e-15
    assert all(float(g.abs().max()) < 1e-15 for g in gradients)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd", "squared"])
def test_a_student_that_agrees_learns_nothing(kind: str):
    whole = case(F32)
    for name in ("hidden", "weight", "bias"):
        whole[f"teacher_{name}"] = whole[name]
    loss, *gradients = alone(whole, kind=kind)
    if kind == "jsd":
        assert abs(float(loss)) < 1e-6
        assert all(float(g.abs().max()) < 1e-7 for g in gradients)
    else:
        assert float(loss) == 0
        assert not any(g.any() for g in gradients)


def test_logits_of_16_bit_layers_are_in_fp32():
    """Of a student that nearly agrees: bf16 logits would be off by more than they differ."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 64, generator=generator).to(BF16) for n in (12, 200))
    other = (hidden.float() * (1 + 0.01 * torch.randn(12, 64, generator=generator))).to(BF16)
    leaves = [t.double().requires_grad_() for t in (hidden, weight)]
    z, y = functional.linear(*leaves), functional.linear(other.double(), weight.double())
    (exact,) = torch.autograd.grad(soft_rows(z, y, {"kind": "forward"}).mean(), leaves[:1])
    given = hidden.requires_grad_()
    linear_kl_divergence(LinearLogits(given, weight), LinearLogits(other, weight)).backward()
    assert given.grad is not None
    error = (given.grad.double() - exact).norm() / exact.norm()
    assert float(error) < 0.01  # a gradient in bf16 is within 2^-9 of each of its numbers


def test_hard_targets_alone_are_the_cross_entropy():
    whole = case(F32)
    found = alone(whole, hard=1.0, chunk_tokens=4)
    leaves = [whole[n].clone().requires_grad_() for n in ("hidden", "weight", "bias")]
    loss = linear_cross_entropy(
        leaves[0],
        leaves[1],
        whole["targets"],
        bias=leaves[2],
        group=ALONE,
        config=LinearCrossEntropyConfig(chunk_tokens=4),
    )
    loss.backward()
    for a, b in zip(found, (loss.detach(), *(leaf.grad for leaf in leaves)), strict=True):
        assert torch.equal(a, b)


def test_the_sums_add_up_and_tokens_without_targets_all_count():
    whole = case(F64)
    student = LinearLogits(*(whole[n] for n in ("hidden", "weight", "bias")))
    teacher = LinearLogits(*(whole[f"teacher_{n}"] for n in ("hidden", "weight", "bias")))
    config = DivergenceConfig(temperature=2.0, hard=0.25)
    sums = DivergenceSums.of(student, teacher, whole["targets"], group=ALONE, config=config)
    assert sums.count == 10
    assert sums.total == 0.75 * sums.soft + 0.25 * sums.hard
    assert sums.hard > 1
    everything = linear_kl_divergence(student, teacher, group=ALONE, reduction="sum")
    z, y = (functional.linear(s.hidden, s.weight, s.bias) for s in (student, teacher))
    assert (everything - soft_rows(z, y, {"kind": "forward"}).sum()).abs() < 1e-11


def test_weights_with_main_grad():
    whole, weights = case(F32), []
    for main in (False, True):
        weight = whole["weight"].clone().requires_grad_()
        if main:
            weight.main_grad = torch.ones_like(weight)
        loss = linear_kl_divergence(
            LinearLogits(whole["hidden"], weight),
            LinearLogits(whole["teacher_hidden"], whole["teacher_weight"]),
            group=ALONE,
        )
        loss.backward()
        weights.append(weight)
    assert weights[1].grad is None
    assert torch.equal(weights[1].main_grad, weights[0].grad + 1)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return found


def test_no_tensor_is_as_large_as_the_logits():
    generator = torch.Generator().manual_seed(0)
    hidden, teacher_hidden = (torch.randn(96, n, generator=generator) for n in (8, 12))
    weight, teacher_weight = (torch.randn(400, n, generator=generator) for n in (8, 12))
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    with Largest() as seen:
        linear_kl_divergence(
            LinearLogits(*leaves),
            LinearLogits(teacher_hidden, teacher_weight),
            group=ALONE,
            config=DivergenceConfig(chunk_tokens=12),
        ).backward()
    assert seen.elements == 12 * 400  # a chunk of logits; those of all tokens would have 96 x 400


@pytest.mark.cpu_only
@pytest.mark.parametrize(("dtype", "tokens"), [(F32, 82), (BF16, 82), (F64, 41)], ids=str)
def test_by_default_the_logits_of_a_chunk_fill_16_mib(dtype: torch.dtype, tokens: int):
    """2,048 tokens in equal chunks; 16-bit layers have logits in fp32."""
    hidden = torch.empty(1, 1, dtype=dtype).expand(2048, 512)
    part = VocabularyPart.of(50304, Ranks.of(ALONE), vocab_size=None, first_column=None)
    assert _chunk_size(hidden, part, None) == tokens
    assert tokens * 50304 * max(4, dtype.itemsize) <= 16 << 20


def bytes_sent(rank: int, group: dist.ProcessGroup) -> list[int]:
    """What a forward pass sends of each kind; nothing requires gradients."""
    found, communicator = [], Communicator.of(group)
    whole = case(F32)
    for options in ({}, {"hard": 0.5}, {"kind": "jsd"}):
        before = communicator.bytes_sent
        linear_kl_divergence(
            LinearLogits(whole["hidden"], whole["weight"]),
            LinearLogits(whole["teacher_hidden"], whole["teacher_weight"]),
            whole["targets"],
            group=group,
            config=DivergenceConfig(chunk_tokens=99, **options),
        )
        found.append(communicator.bytes_sent - before)
    return found


def test_what_a_rank_sends(world: Any):
    """5 numbers a token, 8 with hard targets, 5 and then 2 of a mixture; a row more to agree."""
    numbers = [13 * 5, 13 * 8, 13 * 5 + 12 * 2]
    assert world(2).run(bytes_sent) == [[4 * n for n in numbers]] * 2


def refused(rank: int, group: dist.ProcessGroup) -> list[str]:
    """What each rank hears where rank 1 is wrong."""
    whole, heard = case(F32), []
    for wrong in ({"temperature": 0.0}, {"temperature": 2.0}):
        try:
            linear_kl_divergence(
                LinearLogits(whole["hidden"], whole["weight"]),
                LinearLogits(whole["teacher_hidden"], whole["teacher_weight"]),
                group=group,
                config=DivergenceConfig(**(wrong if rank == 1 else {})),
            )
        except (ValueError, DisagreementError) as error:
            heard.append(f"{type(error).__name__}: {error}")
    return heard


def test_every_rank_hears_of_a_mistake(world: Any):
    """Of options that differ on a CPU alone: nothing waits for a CUDA device."""
    first, second = world(2).run(refused)
    assert second[0].startswith("ValueError")
    assert "temperature is 0.0" in second[0]
    assert first[0].startswith("DisagreementError")
    differ = 1 if torch.get_default_device().type == "cpu" else 0
    for heard in (first, second):
        assert [h.startswith("DisagreementError") for h in heard[1:]] == [True] * differ


@pytest.mark.parametrize(
    ("options", "change", "says"),
    [
        ({"kind": "kl"}, {}, "'kl'"),
        ({"temperature": float("nan")}, {}, "temperature is nan"),
        ({"b": 1.5}, {}, "b is 1.5"),
        ({"kind": "squared", "temperature": 2.0}, {}, "temperature is 2.0"),
        ({"hard": -0.5}, {}, "hard is -0.5"),
        ({"hard": 0.5}, {"targets": None}, "targets is None"),
        ({"chunk_tokens": 0}, {}, "chunk_tokens is 0"),
        ({"vocab_size": 14}, {}, "14"),
        ({}, {"teacher_weight": torch.zeros(12, TEACHER_WIDTH)}, "13 words"),
        ({}, {"teacher_hidden": torch.zeros(2, 5, TEACHER_WIDTH)}, "2, 5, 9"),
        ({}, {"teacher_weight": torch.zeros(WORDS, 4)}, "weight"),
        (
            {},
            {"teacher_weight": torch.zeros(WORDS, TEACHER_WIDTH, requires_grad=True)},
            "requires gradients",
        ),
    ],
)
def test_bad_input(options: dict[str, Any], change: dict[str, Any], says: str):
    whole: dict[str, Any] = case(F32)
    there = whole["hidden"].device  # what is parametrized was made before the test
    whole |= {name: x if x is None else x.to(there) for name, x in change.items()}
    with pytest.raises(ValueError, match=says):
        linear_kl_divergence(
            LinearLogits(whole["hidden"], whole["weight"]),
            LinearLogits(whole["teacher_hidden"], whole["teacher_weight"]),
            whole["targets"],
            group=ALONE,
            config=DivergenceConfig(**options),
        )


def test_bad_reduction():
    whole = case(F32)
    student = LinearLogits(whole["hidden"], whole["weight"])
    with pytest.raises(ValueError, match="'none'"):
        linear_kl_divergence(student, student, group=ALONE, reduction="none")
