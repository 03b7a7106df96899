"""What a step is told is what its method does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.compress import DistillStep, FinetuneStep, PruneStep, QuantizeStep
from pyops.compress.methods import Work, apply_step, learned, pruned
from pyops.compress.methods import quantized as quantizing
from pyops.distill import Distillation, DistillationConfig
from pyops.mesh import ALONE
from pyops.models import GPT, GPTConfig
from pyops.quantized import Int4, Int8, QuantizedLinear, Scheme
from pyops.tensor_parallel import Ranks

pytestmark = pytest.mark.cpu_only

SHAPE = GPTConfig(vocab_size=16, sequence_length=16, num_layers=2, num_heads=2, dim=16)
TOKENS = torch.randint(16, (4, 16), generator=torch.Generator().manual_seed(0))


def work_on(model: nn.Module | None = None, *, teacher: nn.Module | None = None) -> Work:
    texts: Any = SimpleNamespace(
        to_learn=lambda step: repeat((TOKENS, TOKENS)), to_calibrate=lambda: [TOKENS]
    )
    own = GPT(SHAPE, seed=0).eval() if model is None else model
    return Work(own, teacher, texts, Ranks.of(ALONE))


def after(step: Any, model: nn.Module | None = None) -> Work:
    work = work_on(model)
    apply_step(work, step)
    return work


def changed(work: Work) -> set[str]:
    """The names of the parameters that are others than at first."""
    before = dict(GPT(SHAPE, seed=0).named_parameters())
    return {name for name, p in work.model.named_parameters() if not torch.equal(p, before[name])}


LAYERS = "blocks.1.mlp.*"
UP, DOWN = "blocks.1.mlp.up.weight", "blocks.1.mlp.down.weight"


def test_only_what_is_named_is_pruned():
    for options in (
        {"how": "once", "num_steps": 0, "sparsity": 0.5},
        {"how": "once", "num_steps": 0, "pattern": "2:4"},
        {"num_steps": 3, "sparsity": 0.5},
        {"num_steps": 2, "pattern": "2:4"},
    ):
        work = after(PruneStep(**options, only=(LAYERS,)))
        assert work.masks is not None
        assert set(work.masks) == {UP, DOWN}, options
        assert not work.model.training


def test_only_what_is_named_is_quantized_or_adapted():
    for options in ({}, {"algorithm": "gptq"}, {"num_steps": 2}):
        work = after(QuantizeStep(**options, only=(LAYERS,)))
        codes = {n for n, m in work.model.named_modules() if isinstance(m, QuantizedLinear)}
        assert codes == {"blocks.1.mlp.up", "blocks.1.mlp.down"}, options
        assert work.facts["layers"] == 2
    assert changed(after(FinetuneStep(num_steps=2, rank=2, only=(LAYERS,)))) == {UP, DOWN}


def test_the_largest_error_of_the_layers_is_told():
    model = GPT(SHAPE, seed=0).eval()
    found = quantizing.convert(copy.deepcopy(model), Scheme(Int4(group=8)))
    facts = after(QuantizeStep(weights="int4", group=8)).facts
    errors = [layer.error for layer in found.layers]
    assert facts == {"layers": 8, "largest_error": max(errors)}
    assert max(errors) > 1.01 * min(errors)


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        ({}, Scheme(Int8())),
        ({"activations": "token"}, Scheme(Int8(), Int8(per="token"))),
        ({"activations": "tensor"}, Scheme(Int8(), Int8(per="tensor"))),
        ({"weights": "int4", "group": 8}, Scheme(Int4(group=8))),
        ({"weights": "int4", "group": 0}, Scheme(Int4(group=None))),
    ],
)
def test_the_scheme_of_a_step(options, scheme):
    assert quantizing.scheme_of(QuantizeStep(**options)) == scheme


def sure_teacher() -> GPT:
    """Whose words are far from equally likely: of a teacher that says nothing, every temperature
    has the same loss."""
    teacher = GPT(SHAPE, seed=1).eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    return teacher


def test_the_terms_of_distillation():
    """The loss of the first batch is that of the options, from the teacher's words."""
    step = DistillStep(num_steps=1, soft=0.25, hard=0.75, hidden=0.125, temperature=3.0, keep=(1,))
    teacher = sure_teacher()
    work = work_on(teacher=teacher)
    student = learned.student_from_layers(work.model, [1])
    options = DistillationConfig(soft=0.25, hard=0.75, hidden=0.125, temperature=3.0)
    frozen = copy.deepcopy(teacher).requires_grad_(False)
    expected = float(Distillation(options)(student, frozen, TOKENS, TOKENS).loss.detach())
    apply_step(work, step)
    assert work.facts["first_loss"] == pytest.approx(expected, rel=1e-6)
    assert work.model.config.num_layers == 1


def test_the_student_learns_from_the_teacher():
    """The same batch again and again: what the teacher says of it, the student says in the end."""
    work = work_on(teacher=sure_teacher())
    step = DistillStep(num_steps=30, lr=2e-2, warmup_steps=3, hard=0.0, temperature=1.0)
    apply_step(work, step)
    assert work.facts["first_loss"] > 0.02
    assert work.facts["last_loss"] < 0.5 * work.facts["first_loss"]


def test_adapters_have_the_rank_the_scale_and_the_seed_of_the_step():
    """Before the first step the updates are 0; after one they are alpha / rank B A of that rank."""
    before = dict(GPT(SHAPE, seed=0).named_parameters())

    def update(**options: Any) -> Tensor:
        step = FinetuneStep(num_steps=1, warmup_steps=0, **{"rank": 2, **options})
        return (after(step).model.get_parameter(UP) - before[UP]).detach()

    plain = update()
    assert torch.linalg.matrix_rank(plain.double(), rtol=1e-4) == 2
    assert torch.linalg.matrix_rank(update(rank=3).double(), rtol=1e-4) == 3
    assert not torch.allclose(update(seed=1), plain, atol=1e-6)
    torch.testing.assert_close(update(alpha=32.0), 2 * plain, rtol=1e-2, atol=1e-5)


def test_a_share_of_each_layer_stays(monkeypatch):
    """Also of one whose weights are all smaller than those of others."""
    for how, num_steps in (("once", 0), ("gradual", 3)):
        model = GPT(SHAPE, seed=0).eval()
        with torch.no_grad():
            model.get_parameter(UP).mul_(1e-4)
        step = PruneStep(sparsity=0.75, scope="global", least=0.125, how=how, num_steps=num_steps)
        masks = after(step, model).masks
        assert masks is not None
        assert masks[UP].kept == round(0.125 * model.get_parameter(UP).numel())


def test_the_sparsity_grows_over_two_thirds_of_the_steps(monkeypatch):
    """From that of the step before; then the masks stay."""
    shares: list[float] = []
    genuine: Callable[..., Any] = pruned.CubicSchedule

    def schedule(**options: Any) -> Any:
        found = genuine(**options)
        shares[:] = [found.at(i) for i in range(31)]
        return found

    monkeypatch.setattr(pruned, "CubicSchedule", schedule)
    work = after(PruneStep(sparsity=0.25, how="once", num_steps=0))
    apply_step(work, PruneStep(sparsity=0.5, num_steps=30))
    assert shares[0] == 0.25
    assert shares == sorted(shares)
    assert shares[19] < shares[20] == shares[30] == 0.5
    assert work.sparsity == 0.5


def test_permutations_are_of_the_seed(monkeypatch):
    seeds: list[int] = []
    genuine = pruned.permute
    monkeypatch.setattr(
        pruned, "permute", lambda m, *, seed: seeds.append(seed) or genuine(m, seed=seed)
    )
    after(PruneStep(pattern="2:4", permute=True, how="once", num_steps=0, seed=7))
    assert seeds == [7]


def test_training_with_the_rounding_in_mind_is_told_how_long_it_is(monkeypatch):
    """Ranges of inputs stop to move before its end, and the codes are those that it ends with."""
    told: list[int] = []
    genuine = quantizing.aware

    def aware(model: nn.Module, scheme: Scheme, *, steps: int, **options: Any) -> Any:
        told.append(steps)
        return genuine(model, scheme, steps=steps, **options)

    monkeypatch.setattr(quantizing, "aware", aware)
    work = after(QuantizeStep(num_steps=3, activations="tensor"))
    assert told == [3]
    assert {"first_loss", "last_loss", "layers", "largest_error"} == set(work.facts)
