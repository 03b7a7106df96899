"""Every layout of the ranks generates the same tokens."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyops.mesh import ALONE, Axes, Mesh
from pyops.models import generate, score
from tests.grids import cut, full
from tests.models.talkers import PROMPTS, talker

SEEDS = 100  # under `-m full`
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 0.0},
]

Found = list[tuple[list[int], float]]


def texts(model: Any, *, seeds: int, pipe: Any = ALONE) -> Found:
    """What follows one of the prompts, of each seed, and of all prompts at once of the last."""
    found = []
    for seed in range(seeds):
        given = PROMPTS if seed == seeds - 1 else [PROMPTS[seed % len(PROMPTS)]]
        options = {"max_new": 3, "rows": 2, "seed": seed, "end": 12, **OPTIONS[seed % 4]}
        rows = generate(model, given, pipe=pipe, **options)
        found += [(row.tokens, row.log_likelihood) for row in rows]
    return found


@functools.cache
def alone(name: str, seeds: int) -> Found:
    return texts(talker(name), seeds=seeds)


def shared(rank: int, group: Any, name: str, seeds: int, options: dict[str, Any]) -> Any:
    model = talker(name, group=group, **options)
    given = torch.tensor([[1, 2, 3], [4, 5, 3]])
    more = {"prompts": (given, [3, 2])} if name == "t5" else {}
    return texts(model, seeds=seeds), score(model, given, [3, 2], **more)


def staged(rank: int, group: Any, name: str, seeds: int, tp: int) -> Any:
    mesh = Mesh(Axes(pp=dist.get_world_size() // tp, tp=tp))
    pipe, stage, stages = mesh.group("pp"), mesh.rank("pp"), mesh.size("pp")
    model = talker(name, group=mesh.group("tp") if tp > 1 else ALONE)
    layers = [0, 1, 2, 3] if stages == 1 else [[0, 1], [2, 3]][stage]
    model.keep_layers(layers)
    return texts(model, seeds=seeds, pipe=pipe)


def compare(found: Found, expected: Found) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, own), (_, other) in zip(found, expected, strict=True):
        assert own == pytest.approx(other, abs=1e-9)


GRID = list(itertools.product(["gpt", "llama", "t5"], [2, 4], [8, SEEDS]))
KEPT = [("gpt", 2, 8), ("llama", 4, 8)]


@pytest.mark.parametrize(("name", "ranks", "seeds"), cut(GRID, keep=KEPT))
def test_tensor_parallel_ranks_generate_the_same(world, name, ranks, seeds):
    options = {"sequence_parallel": True} if name == "gpt" else {}
    expected = alone(name, seeds)
    assert len({tuple(tokens) for tokens, _ in expected}) > seeds / 4
    given = torch.tensor([[1, 2, 3], [4, 5, 3]])
    more = {"prompts": (given, [3, 2])} if name == "t5" else {}
    scores = score(talker(name), given, [3, 2], **more)
    for found, found_scores in world(ranks).run(shared, name, seeds, options):
        compare(found, expected)
        torch.testing.assert_close(found_scores, scores, rtol=0, atol=1e-9)


STAGES = [(2, 1, 8), (4, 2, 8), full(2, 1, SEEDS), full(4, 2, SEEDS)]


@pytest.mark.parametrize(("ranks", "tp", "seeds"), STAGES)
def test_stages_generate_the_same(world, ranks, tp, seeds):
    for found in world(ranks).run(staged, "llama", seeds, tp):
        compare(found, alone("llama", seeds))


def mistaken(rank: int, group: Any) -> list[str]:
    """What is refused on every rank alike."""
    found = []
    model = talker("gpt", group=group)
    for prompts, options in (
        ([[1, 13 if rank else 2]], {}),
        ([[1, 2]], {"top_p": 0.5 * (1 + rank) + 0.2}),
        ([[1, 2 + rank]], {}),
    ):
        with pytest.raises(ValueError) as error:
            generate(model, prompts, max_new=2, **options)
        found.append(str(error.value))
    with pytest.raises(ValueError) as error, pytest.warns(UserWarning, match="rows is 1"):
        generate(talker("gpt"), [[1]], max_new=2, rows=1, pipe=group)
    found.append(str(error.value))
    return found


def test_mistakes_are_raised_on_every_rank(world):
    first, second = world(2).run(mistaken)
    assert first == second
    tokens, top_p, prompts, stages = first
    assert "the token 13" in tokens
    assert "top_p is 1.2" in top_p
    assert "prompts is [[1, 2]] on rank 0, but [[1, 3]] on rank 1" in prompts
    assert "[[0, 1], [0, 1]] of 2" in stages
