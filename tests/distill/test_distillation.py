"""The loss of distillation against autograd over whole logits, on one and two ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pyops.distill import (
    Distillation,
    DistillationConfig,
    freeze,
    logits_divergence,
    student_from_layers,
)
from pyops.distill.hidden_states import compared
from pyops.models import GPT, GPTConfig
from pyops.tensor_parallel import DivergenceConfig
from tests.grids import full
from tests.tensor_parallel.functional.losses.test_linear_kl_divergence import soft_rows

transformers = pytest.importorskip("transformers")

SHAPE = {"vocab_size": 31, "sequence_length": 16, "num_layers": 4, "num_heads": 2, "dim": 16}
EVERYTHING = DistillationConfig(
    soft=5.0, hard=2.0, hidden=1.5, temperature=2.0, layers=((-1, -1), (0, 1))
)


def rows() -> tuple[Tensor, Tensor]:
    """Tokens and the words that follow, of which three do not count."""
    text = torch.randint(31, (2, 13), generator=torch.Generator().manual_seed(1))
    tokens, targets = text[:, :-1], text[:, 1:].clone()
    targets[0, :2] = targets[1, -1] = -100
    return tokens, targets


def plain(
    student: nn.Module, teacher: nn.Module, config: DistillationConfig, projection: Any = None
) -> Tensor:
    """The loss of whole logits."""
    tokens, targets = rows()
    states: list[Tensor] = []
    handles = [
        model.blocks[i].register_forward_hook(lambda _m, _i, out: states.append(out))
        for model, numbers in zip((student, teacher), zip(*config.layers, strict=True), strict=True)
        for i in sorted(n % len(model.blocks) for n in numbers)
    ]
    z, y = student(tokens).view(-1, 31), teacher(tokens).detach().view(-1, 31)
    for handle in handles:
        handle.remove()
    counts = targets.view(-1) != -100
    options = {"kind": config.kind, "temperature": config.temperature}
    loss = config.soft * soft_rows(z, y, options)[counts].mean()
    loss = loss + config.hard * functional.cross_entropy(z, targets.view(-1))
    if config.hidden:  # pairs (0, 1) and (last, last), in the order of layers
        for h, t in ((states[0], states[2]), (states[1], states[3])):
            h = h if projection is None else projection(h)
            away = 1 - functional.cosine_similarity(h, t.detach(), dim=-1)
            loss = loss + config.hidden * away.flatten()[counts].mean() / 2
    return loss


def test_the_terms_add_up_to_the_loss_of_whole_logits():
    torch.manual_seed(0)
    teacher = freeze(GPT(GPTConfig(**SHAPE), seed=5, dtype=torch.float64))
    student = student_from_layers(teacher, keep=[0, 2])
    with torch.no_grad():
        for p in student.parameters():
            p.add_(0.1 * torch.randn_like(p))
    other = copy.deepcopy(student)
    plain(other, teacher, EVERYTHING).backward()
    tokens, targets = rows()
    found = Distillation(EVERYTHING)(student, teacher, tokens, targets)
    found.loss.backward()
    assert (found.loss - plain(student, teacher, EVERYTHING)).abs() < 1e-12
    parts = 5.0 * found.soft + 2.0 * found.hard + 1.5 * found.hidden
    assert (parts - found.loss).abs() < 1e-12
    assert found.count == 21
    assert min(found.soft, found.hard, found.hidden) > 0.01
    for own, expected in zip(student.parameters(), other.parameters(), strict=True):
        assert expected.grad.abs().max() > 1e-6
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-10, atol=1e-13)
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("compare", ["cosine", "normalized", "squared"])
def test_hidden_states_of_another_width(compare: str):
    torch.manual_seed(0)
    teacher = freeze(GPT(GPTConfig(**SHAPE | {"dim": 24})))
    student = GPT(GPTConfig(**SHAPE | {"num_layers": 2}), seed=1)
    config = DistillationConfig(soft=1.0, hard=0.0, hidden=1.0, compare=compare)
    distillation = Distillation(config, student_width=16, teacher_width=24)
    found = distillation(student, teacher, *rows())
    found.loss.backward()
    (projection,) = distillation.parameters()
    assert projection.grad.abs().max() > 1e-6
    assert found.hidden > 0
    with pytest.raises(ValueError, match="student_width"):
        Distillation(config)(student, teacher, *rows())


def test_what_is_compared_of_hidden_states():
    """By hand, of the vectors (3, 4) and (0, 2): lengths 5 and 2, product 8."""
    h, t = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([0.0, 2.0]).double()
    expected = {
        "cosine": 1 - 8 / 10,
        "normalized": (0.6**2 + 0.2**2) / 2,
        "squared": (3**2 + 2**2) / 2,
    }
    for kind, value in expected.items():
        assert float(compared(kind, h, t)) == pytest.approx(value, rel=1e-12)


def losses_on_rank(rank: int, group: dist.ProcessGroup | None, whole_teacher: bool) -> list[float]:
    """Five steps of a student, which two ranks share, beside a teacher that they share or not."""
    cut: dict[str, Any] = {} if group is None else {"group": group}
    teacher = freeze(
        GPT(GPTConfig(**SHAPE), seed=5, dtype=torch.float64, **({} if whole_teacher else cut))
    )
    student = GPT(
        GPTConfig(**SHAPE | {"num_layers": 2, "dropout": 0.1}), dtype=torch.float64, **cut
    )
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    distillation = Distillation(DistillationConfig(soft=1.0, hard=0.5, temperature=2.0))
    found = []
    for step in range(5):
        student.set_dropout((2, 12), seed=0, step=step)
        loss = distillation(student, teacher, *rows()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("whole_teacher", [full(False), True])
def test_ranks_that_share_the_models_see_the_same_losses(world: Any, whole_teacher: bool):
    alone = losses_on_rank(0, None, True)
    assert alone[-1] < alone[0] - 0.1
    for found in world(2).run(losses_on_rank, whole_teacher):
        assert found == pytest.approx(alone, rel=1e-10)


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes | changes, num_attention_heads=2)
    )


def test_models_of_transformers():
    student, teacher = llama(), freeze(llama(hidden_size=24))
    tokens, targets = rows()
    found = Distillation()(student, teacher, {"input_ids": tokens}, targets)
    z, y = (model(input_ids=tokens).logits.double() for model in (student, teacher))
    expected = logits_divergence(
        z, y.detach(), targets, config=DivergenceConfig(temperature=2.0, hard=0.5)
    )
    assert (found.loss - expected).abs() < 1e-5
    found.loss.backward()
    assert student.lm_head.weight.grad.abs().max() > 1e-4
    assert student(input_ids=tokens).logits.shape == (2, 12, 31), "the head is its own again"


def test_a_model_that_changes_its_logits_is_refused():
    class Capped(nn.Module):
        """Logits that are squashed after the last layer."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def forward(self, tokens: Tensor) -> Tensor:
            return torch.tanh(self.head(self.embed(tokens)))

    teacher = freeze(GPT(GPTConfig(**SHAPE)))
    with pytest.raises(ValueError, match="logits_divergence"):
        Distillation()(Capped(), teacher, *rows())
    with pytest.raises(ValueError, match="logits_divergence"):
        Distillation()(nn.Linear(2, 2), teacher, *rows())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.requires_grad_(True), r"freeze\(teacher\)"),
        (lambda t: t.train(), "training mode"),
        (lambda t: freeze(GPT(GPTConfig(**SHAPE | {"vocab_size": 32}))), "31 words.*32"),
    ],
)
def test_teachers_that_do_not_fit(change: Any, says: str):
    teacher = freeze(GPT(GPTConfig(**SHAPE)))
    with pytest.raises(ValueError, match=says):
        Distillation()(GPT(GPTConfig(**SHAPE)), change(teacher), *rows())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"soft": -1.0}, "soft is -1.0"),
        ({"soft": 0.0, "hard": 0.0}, "soft and hard are 0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"kind": "L2"}, "'L2'"),
        ({"compare": "angle"}, "'angle'"),
        ({"hidden": 1.0, "layers": ()}, "layers is empty"),
    ],
)
def test_bad_options(options: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        DistillationConfig(**options)


def test_a_layer_that_is_not_there():
    teacher = freeze(GPT(GPTConfig(**SHAPE)))
    config = DistillationConfig(hidden=1.0, layers=((0, 9),))
    with pytest.raises(ValueError, match="there is no 9"):
        Distillation(config)(GPT(GPTConfig(**SHAPE)), teacher, *rows())
