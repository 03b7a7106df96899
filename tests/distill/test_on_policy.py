"""Batches that a student writes itself: the part that is asked for, its own words, and nothing of
the prompt."""

from __future__ import annotations

import pytest
import torch

from pyops.distill import Distillation, DistillationConfig, freeze, on_policy
from pyops.models import GPT, GPTConfig, generate

pytestmark = pytest.mark.cpu_only
SHAPE = {"vocab_size": 11, "sequence_length": 12, "num_layers": 1, "num_heads": 2, "dim": 16}


def texts(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(11, (3, 9), generator=generator) for _ in range(count)]


def test_a_part_of_the_batches_is_the_students():
    student = GPT(GPTConfig(**SHAPE), seed=1)
    given = texts(40)
    found = list(on_policy(student, given, part=0.5, prompt_tokens=4, seed=3))
    own = [batch.of_student for batch in found]
    assert 10 < sum(own) < 30
    for text, batch in zip(given, found, strict=True):
        assert batch.tokens.shape == batch.targets.shape == (3, 8)
        assert torch.equal(batch.tokens[:, :4], text[:, :4])
        if batch.of_student:
            assert (batch.targets[:, :3] == -100).all()
            assert torch.equal(batch.targets[:, 3:-1], batch.tokens[:, 4:])
        else:
            assert torch.equal(batch.tokens, text[:, :-1])
            assert torch.equal(batch.targets, text[:, 1:])
    number = own.index(True)
    rows = generate(
        student,
        list(given[number][:, :4]),
        max_new=5,
        temperature=1.0,
        seed=3,
        first_row=3 * number,
    )
    said = torch.tensor([row.tokens for row in rows])
    assert torch.equal(found[number].targets[:, 3:], said)
    assert student.training
    again = list(
        on_policy(student, given[number:], part=0.5, prompt_tokens=4, seed=3, first=number)
    )
    assert torch.equal(again[0].tokens, found[number].tokens)
    assert [batch.of_student for batch in again] == own[number:]


def test_parts_of_none_and_of_all():
    student = GPT(GPTConfig(**SHAPE))
    for part in (0.0, 1.0):
        found = on_policy(student, texts(6), part=part, prompt_tokens=2)
        assert {batch.of_student for batch in found} == {bool(part)}


def test_a_student_learns_from_its_own_words():
    """The reverse divergence of what it says falls, with no label at all."""
    teacher = freeze(GPT(GPTConfig(**SHAPE), seed=5))
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(5)
    student = GPT(GPTConfig(**SHAPE), seed=1)
    loss_of = Distillation(DistillationConfig(soft=1.0, hard=0.0, kind="jsd", temperature=1.0))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    losses = []
    for batch in on_policy(student, texts(40), part=1.0, prompt_tokens=2):
        loss = loss_of(student, teacher, batch.tokens, batch.targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_bad_options():
    student = GPT(GPTConfig(**SHAPE))
    with pytest.raises(ValueError, match=r"part is 1\.5"):
        on_policy(student, texts(1), part=1.5, prompt_tokens=2)
    with pytest.raises(ValueError, match="prompt_tokens is 0"):
        on_policy(student, texts(1), part=0.5, prompt_tokens=0)
    with pytest.raises(ValueError, match="prompt_tokens is 9, but batch 0 has texts of 9"):
        next(on_policy(student, texts(1), part=0.5, prompt_tokens=9))
