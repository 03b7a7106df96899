"""Parameters that stages share: found, summed over ranks with one process's bits, counted once in
norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pyops.mesh import ALONE
from pyops.pipeline import Pipeline, PipelineConfig, schedule
from tests.pipeline.reference import sequential_step

pytestmark = pytest.mark.cpu_only

WIDTH, WORDS = 8, 12
WIDE = 1024  # enough elements for the order of a sum to show


class Header(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.scale = weight, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        return (x * self.scale) @ self.weight.T


def language_model(*, seed: int = 7, copies: bool = False) -> list[nn.Module]:
    """Embedding, 4 blocks of which two share a bias, head; copies: of each stage, which no object
    ties."""
    torch.manual_seed(seed)
    embedding = nn.Embedding(WORDS, WIDTH)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    blocks[3][0].bias = blocks[1][0].bias
    weight = nn.Parameter(embedding.weight.detach().clone()) if copies else embedding.weight
    return [embedding, *blocks, Header(weight)]


def batch(rows: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randint(0, WORDS, (rows,), generator=generator) for _ in range(2))


loss_of = nn.functional.cross_entropy


def expected_gradients(plan: Any, boundaries: list[int], steps: int) -> dict[str, torch.Tensor]:
    """Stage by stage in the order of the schedule, then the stages' parts added, step after
    step."""
    found: dict[str, torch.Tensor] = {}
    for step in range(steps):
        untied = language_model()
        untied[5].weight = nn.Parameter(untied[0].weight.detach().clone())
        untied[4][0].bias = nn.Parameter(untied[2][0].bias.detach().clone())
        sequential_step(untied, plan, boundaries, *batch(10 + step), loss_of)
        parts = {name: p.grad for name, p in nn.Sequential(*untied).named_parameters()}
        for one, other in (("0.weight", "5.weight"), ("2.0.bias", "4.0.bias")):
            parts[one] = parts[other] = parts[one] + parts[other]
        found = {
            name: part + found[name] if name in found else part for name, part in parts.items()
        }
    return found


def over_ranks(rank: int, group: Any, name: str, boundaries: list[int]) -> list[torch.Tensor]:
    plan = schedule(name, num_stages=group.size(), num_microbatches=3)
    layers = language_model(
        seed=7 + rank if name == "gpipe" else 7
    )  # copies that differ begin with the first one's values
    pipeline = Pipeline(
        layers,
        schedule=plan,
        group=group,
        loss=loss_of,
        config=PipelineConfig(boundaries=boundaries),
    )
    assert pipeline.tied == (("0.weight", "5.weight"), ("2.0.bias", "4.0.bias"))
    if name == "gpipe":
        torch.manual_seed(7)
        values = dict(nn.Sequential(*language_model()).named_parameters(remove_duplicate=False))
        own = dict(pipeline.named_parameters())
        assert all(torch.equal(own[n], values[n]) for n in ("0.weight", "5.weight") if n in own)
        pipeline.load_state_dict(
            {n: v for n, v in nn.Sequential(*language_model()).state_dict().items() if n in own}
        )
    for step in range(2):  # accumulates over steps
        pipeline.step(*batch(10 + step))
    wanted = expected_gradients(plan, boundaries, 2)
    owner = {
        n: plan.rank_of[sum(b <= int(n[0]) for b in boundaries) - 1]
        for names in pipeline.tied
        for n in names
    }
    across = [
        n for names in pipeline.tied for n in names if len({owner[each] for each in names}) > 1
    ]
    assert across
    for n, p in pipeline.named_parameters():
        assert p.grad is not None
        assert bool((p.grad != 0).any())
        torch.testing.assert_close(p.grad, wanted[n], rtol=1e-5, atol=1e-7)
        if n in across:
            assert torch.equal(p.grad, wanted[n]), n
    reference = [g for n, g in wanted.items() if n not in ("5.weight", "4.0.bias")]
    norm = torch.stack([g.double().square().sum() for g in reference]).sum().sqrt().float()
    assert torch.allclose(pipeline.grad_norm(), norm, rtol=1e-6)
    assert torch.allclose(pipeline.clip_grad_norm_(0.1), norm, rtol=1e-6)
    assert torch.allclose(pipeline.grad_norm(), torch.tensor(0.1), rtol=1e-4)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        pipeline.step(*batch())
    optimizer.step()
    return [
        p.detach()
        for n, p in pipeline.named_parameters()
        if n in ("0.weight", "5.weight", "2.0.bias", "4.0.bias")
    ]


@pytest.mark.parametrize(
    ("name", "ranks", "boundaries"),
    [
        ("1f1b", 2, [0, 3, 6]),
        ("zb1p", 2, [0, 3, 6]),
        ("gpipe", 3, [0, 2, 4, 6]),
        ("zbv", 2, [0, 1, 3, 4, 6]),
        ("interleaved", 2, [0, 1, 3, 4, 6]),
    ],
)
def test_copies_get_the_sum_of_their_gradients_and_stay_equal(
    world, name: str, ranks: int, boundaries: list[int]
):
    ends = [
        tensor for tensors in world(ranks).run(over_ranks, name, boundaries) for tensor in tensors
    ]
    embeddings = [t for t in ends if t.dim() == 2]
    biases = [t for t in ends if t.dim() == 1]
    assert embeddings
    assert all(torch.equal(embeddings[0], t) for t in embeddings)
    assert all(torch.equal(biases[0], t) for t in biases)


def test_in_one_process_there_is_one_parameter():
    plan = schedule("zb1p", num_stages=3, num_microbatches=3)
    layers, plain = language_model(), language_model()
    pipeline = Pipeline(
        layers,
        schedule=plan,
        group=ALONE,
        loss=loss_of,
        config=PipelineConfig(boundaries=[0, 2, 4, 6]),
    )
    assert pipeline.tied == (("0.weight", "5.weight"), ("2.0.bias", "4.0.bias"))
    for _ in range(2):
        pipeline.step(*batch())
        loss_of(nn.Sequential(*plain)(batch()[0]), batch()[1]).backward()
    for p, q in zip(pipeline.parameters(), nn.Sequential(*plain).parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
    theirs = torch.nn.utils.clip_grad_norm_(nn.Sequential(*plain).parameters(), 1e9)
    torch.testing.assert_close(pipeline.grad_norm(), theirs)


class TakesApart(nn.Module):
    """Uses its weight only where it is told to."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.used = weight, True

    def forward(self, x: Any) -> Any:
        return torch.sin(x * self.weight) if self.used else x.clone()


def used_by_some(rank: int, group: Any) -> torch.Tensor:
    plan = schedule("1f1b", num_stages=3, num_microbatches=2)
    weight = nn.Parameter(torch.full((WIDE,), 2.0))
    layers = [TakesApart(weight) for _ in range(3)]
    pipeline = Pipeline(
        layers, schedule=plan, group=group, loss=lambda y, t: (y - t).square().mean()
    )
    x, target = torch.rand(4, WIDE), torch.rand(4, WIDE)
    pipeline.step(x, target)
    by_all = next(iter(pipeline.parameters())).grad.clone()
    layers[1].used = False
    pipeline.zero_grad()
    pipeline.step(x, target)
    alone = torch.full((WIDE,), 2.0, requires_grad=True)
    (torch.sin(torch.sin(x * alone) * alone) - target).square().mean().backward()
    torch.testing.assert_close(next(iter(pipeline.parameters())).grad, alone.grad)
    for layer in layers:
        layer.used = False
    pipeline.zero_grad()
    pipeline.step(x.requires_grad_(), target)
    assert next(iter(pipeline.parameters())).grad is None
    return by_all


def test_a_copy_without_a_gradient_gets_that_of_the_others(world):
    first, second, third = world(3).run(used_by_some)
    assert bool((first != 0).any())
    assert torch.equal(first, second)  # three terms: a sum in another order has other bits
    assert torch.equal(first, third)


def declared(rank: int, group: Any) -> list[str]:
    plan = schedule("1f1b", num_stages=2, num_microbatches=2)
    pipeline = Pipeline(
        language_model(copies=True),
        schedule=plan,
        group=group,
        loss=loss_of,
        config=PipelineConfig(boundaries=[0, 3, 6], tied=[("5.weight", "0.weight")]),
    )
    assert pipeline.tied == (("0.weight", "5.weight"), ("2.0.bias", "4.0.bias"))
    for rank_that_fails in range(2):
        words, targets = batch()
        if rank == rank_that_fails:
            words, targets = words + WORDS, targets + WORDS
        with pytest.raises((IndexError, RuntimeError)):
            pipeline.step(words, targets)
    pipeline.zero_grad()
    pipeline.step(*batch())
    wanted = expected_gradients(plan, [0, 3, 6], 1)
    assert all(torch.equal(p.grad, wanted[n]) for n, p in pipeline.named_parameters())
    messages = []
    for names in (("0.weight", "7.weight"), ("0.weight", "1.0.bias")):
        try:
            Pipeline(
                language_model(),
                schedule=plan,
                group=group,
                loss=loss_of,
                config=PipelineConfig(tied=[names] if rank else ()),
            )
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_ties_that_no_object_shows(world):
    for messages in world(2).run(declared):
        assert "no layer has" in messages[0]
        assert "7.weight" in messages[0]
        assert "must be alike" in messages[1]
    with pytest.raises(ValueError, match="two parameters; let the layers share one"):
        Pipeline(
            language_model(copies=True),
            schedule=schedule("1f1b", num_stages=2, num_microbatches=2),
            group=ALONE,
            loss=loss_of,
            config=PipelineConfig(boundaries=[0, 3, 6], tied=[("5.weight", "0.weight")]),
        )
