"""A teacher's most probable words on disk: with all words the live loss, with some their mass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pyops.distill import LinearLogits, freeze, read_logits, stored_divergence, write_logits
from pyops.models import GPT, GPTConfig
from tests.tensor_parallel.functional.losses.test_linear_kl_divergence import soft_rows

SHAPE = {"vocab_size": 17, "sequence_length": 8, "num_layers": 1, "num_heads": 2, "dim": 16}


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(17, (2, 6), generator=generator) for _ in range(2)]


def teacher() -> GPT:
    made = GPT(GPTConfig(**SHAPE), seed=4)
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(8)  # so that words differ in probability
    return freeze(made)


def student() -> LinearLogits:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(17, 5, generator=generator, dtype=torch.float64)
    return LinearLogits(hidden.requires_grad_(), weight.requires_grad_())


def test_with_every_word_it_is_the_live_loss(tmp_path: Path):
    said = teacher()
    assert write_logits(said, batches(), tmp_path / "all", top=17, temperature=2.0) == 2
    for batch, stored in zip(batches(), read_logits(tmp_path / "all", batches()), strict=True):
        mass = stored.log_probabilities.double().exp().sum(-1) + stored.rest
        assert (mass - 1).abs().max() < 2e-3  # numbers of fp16
        own = student()
        loss = stored_divergence(own, stored, chunk_tokens=5)
        loss.backward()
        z = functional.linear(own.hidden, own.weight).view(-1, 17)
        y = said(batch).double().view(-1, 17)
        live = soft_rows(z, y, {"kind": "forward", "temperature": 2.0}).mean()
        assert (loss - live).abs() < 5e-3 * live
        whole = torch.autograd.grad(live, [own.hidden, own.weight])
        for a, b in zip((own.hidden.grad, own.weight.grad), whole, strict=True):
            assert (a - b).abs().max() < 5e-3 * b.abs().max()


def test_the_words_that_are_not_stored_keep_their_mass(tmp_path: Path):
    """A student with the teacher's probabilities has loss zero, and is not pushed away."""
    said = teacher()
    write_logits(said, batches()[:1], tmp_path / "some", top=3)
    (stored,) = read_logits(tmp_path / "some")
    assert stored.words.shape == (2, 6, 3)
    assert (stored.rest > 0.05).any()
    logits = said(batches()[0]).double()
    own = LinearLogits(logits.requires_grad_(), torch.eye(17, dtype=torch.float64))
    loss = stored_divergence(own, stored)
    assert 0 <= float(loss.detach()) < 1e-5
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.abs().max() < 1e-4
    without = dataclasses.replace(stored, rest=torch.zeros_like(stored.rest))
    (pushed,) = torch.autograd.grad(stored_divergence(own, without), logits)
    assert pushed.abs().max() > 1e-3


def test_tokens_that_do_not_count(tmp_path: Path):
    write_logits(teacher(), batches()[:1], tmp_path / "all", top=17)
    (stored,) = read_logits(tmp_path / "all")
    targets = torch.zeros(2, 6, dtype=torch.int64)
    targets[0] = -100
    own = student()
    part = stored_divergence(own, stored, targets, reduction="sum")
    halves = [
        stored_divergence(
            LinearLogits(own.hidden[i : i + 1], own.weight),
            dataclasses.replace(
                stored,
                words=stored.words[i : i + 1],
                log_probabilities=stored.log_probabilities[i : i + 1],
                rest=stored.rest[i : i + 1],
            ),
            reduction="sum",
        )
        for i in (0, 1)
    ]
    assert (part - halves[1]).abs() < 1e-12
    assert (stored_divergence(own, stored, reduction="sum") - sum(halves)).abs() < 1e-11


def test_other_tokens_than_the_teacher_saw(tmp_path: Path):
    write_logits(teacher(), batches(), tmp_path / "seen", top=2)
    with pytest.raises(ValueError, match="batch 0 is another"):
        list(read_logits(tmp_path / "seen", reversed(batches())))
    with pytest.raises(ValueError, match=f"end after 1, but .* saw {len(batches())}"):
        list(read_logits(tmp_path / "seen", batches()[:1]))
    with pytest.raises(FileExistsError, match="holds stored logits"):
        write_logits(teacher(), batches(), tmp_path / "seen")
    with pytest.raises(FileNotFoundError, match="no stored logits"):
        list(read_logits(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("options", "says"),
    [({"top": 18}, "17 words"), ({"top": 0}, "top is 0"), ({"temperature": 0.0}, "0.0")],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        write_logits(teacher(), batches(), tmp_path / "bad", **options)
    assert not (tmp_path / "bad").exists()


def test_bad_stored_words(tmp_path: Path):
    write_logits(teacher(), batches()[:1], tmp_path / "all", top=17)
    (stored,) = read_logits(tmp_path / "all")
    own = student()
    with pytest.raises(ValueError, match=r"\[2, 6\]"):
        stored_divergence(LinearLogits(own.hidden[:, :5], own.weight), stored)
    with pytest.raises(ValueError, match="word 16"):
        stored_divergence(LinearLogits(own.hidden, own.weight[:9]), stored)
