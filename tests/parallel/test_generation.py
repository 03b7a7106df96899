"""Every layout generates the tokens that transformers generates on one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.optim import AdamW
from pyops.parallel import ParallelPlan, PipelineOptions, Trainer, parallelize
from pyops.parallel.generation import CACHE_NAMES, GenerationOptions
from pyops.zero import ZeroConfig
from tests.grids import full
from tests.parallel.tiny_transformers import VOCAB, make_model

pytestmark = pytest.mark.cpu_only

PLANS = {
    "tp": ParallelPlan(tp=2),
    "pp": ParallelPlan(pp=2),
    "interleaved": ParallelPlan(pp=2, pipeline=PipelineOptions("interleaved", stages_per_rank=2)),
    "zero 3": ParallelPlan(zero=ZeroConfig(stage=3)),
}
NEW = 12
NAMES = ("llama", "llama tied", "qwen3", "gpt2", "gemma3", "gpt-neox")


def prompt(rows: int = 3, length: int = 6) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def padded() -> dict[str, Tensor]:
    tokens, mask = prompt(), torch.ones(3, 6, dtype=torch.long)
    tokens[1, :3] = 0
    mask[1, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def trainer_of(name: str, plan: ParallelPlan) -> Trainer:
    return parallelize(make_model(name), plan, optimizer=partial(AdamW, lr=1e-2))


def reference(name: str, given: dict[str, Tensor]) -> Tensor:
    model = make_model(name).eval()
    return model.generate(
        **given, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )


def generated(
    rank: int, group: object, name: str, plan: ParallelPlan, options: Any
) -> list[Tensor]:
    trainer = trainer_of(name, plan)
    return [
        trainer.generate(prompt(), max_new_tokens=NEW),
        trainer.generate(padded(), max_new_tokens=NEW),
        trainer.generate(prompt(), max_new_tokens=NEW, **options),
    ]


SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 5}


# Positions by rotation, by a table, and windows of attention; the others differ in no kept key.
@pytest.mark.parametrize(
    "name", [name if name in ("llama", "gpt2", "gemma3") else full(name) for name in NAMES]
)
def test_one_process_generates_what_transformers_does(name):
    plain, left, sampled = generated(0, None, name, ParallelPlan(), SAMPLED)
    assert torch.equal(plain, reference(name, {"input_ids": prompt()}))
    assert torch.equal(left, reference(name, padded()))
    assert not torch.equal(sampled, plain)
    assert len({tuple(row.tolist()) for row in sampled[:, 6:]}) == 3


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", "tp"),
        full("llama", "pp"),
        full("llama", "interleaved"),
        ("llama", "zero 3"),
        full("gpt2", "pp"),
        ("gemma3", "interleaved"),
        full("qwen3", "tp"),
        full("llama tied", "pp"),  # as gpt2, whose head is its table too
    ],
)
def test_every_layout_generates_the_same(name, plan, world):
    expected = generated(0, None, name, ParallelPlan(), SAMPLED)
    results = world(2).run(generated, name, PLANS[plan], SAMPLED)
    copies = [expected] * 2
    if plan == "zero 3":  # two copies, whose rows are drawn apart: as those of one batch
        trainer = trainer_of(name, ParallelPlan())
        both = trainer.generate(torch.cat([prompt(), prompt()]), max_new_tokens=NEW, **SAMPLED)
        copies = [[*expected[:2], rows] for rows in both.split(3)]
        assert not torch.equal(copies[0][2], copies[1][2])
    for found, wanted in zip(results, copies, strict=True):
        assert all(map(torch.equal, found, wanted))


def test_draws_are_keyed_by_row_and_position():
    trainer = trainer_of("llama", ParallelPlan())
    whole = trainer.generate(prompt(), max_new_tokens=NEW, **SAMPLED)
    assert torch.equal(whole[:1], trainer.generate(prompt()[:1], max_new_tokens=NEW, **SAMPLED))
    assert torch.equal(whole[:, :8], trainer.generate(prompt(), max_new_tokens=2, **SAMPLED))
    other = trainer.generate(prompt(), max_new_tokens=NEW, **{**SAMPLED, "seed": 6})
    assert not torch.equal(whole, other)


def test_draws_follow_the_softmax():
    from pyops.parallel.generation import GenerationOptions, _choose

    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20000, 4)
    options = GenerationOptions(temperature=0.7)
    counts = torch.bincount(_choose(logits, options, position=0, first_row=0), minlength=4) / 20000
    torch.testing.assert_close(counts, torch.softmax(logits[0] / 0.7, 0), rtol=0, atol=0.015)
    options = GenerationOptions(temperature=1.0, top_p=0.7)  # of 0.087, 0.237, 0.644 and 0.032
    counts = torch.bincount(_choose(logits, options, position=0, first_row=0), minlength=4)
    assert counts[[0, 3]].tolist() == [0, 0]
    assert min(counts[[1, 2]].tolist()) > 4000
    with pytest.raises(ValueError, match="top_p is 0"):
        GenerationOptions(top_p=0.0).validate()


def ended(rank: int, group: object, plan: ParallelPlan, eos: int | list[int]) -> Tensor:
    return trainer_of("llama", plan).generate(
        prompt(), max_new_tokens=NEW, eos_token_id=eos, pad_token_id=2
    )


def test_rows_end_with_their_token_on_every_layout(world):
    plain = trainer_of("llama", ParallelPlan()).generate(prompt(), max_new_tokens=NEW)
    eos = int(plain[0, 8])
    expected = ended(0, None, ParallelPlan(), eos)
    first = expected[0, 6:].tolist()
    assert eos in first
    assert set(first[first.index(eos) + 1 :]) <= {2}
    for found in world(2).run(ended, PLANS["pp"], eos):
        assert torch.equal(found, expected)
    early = int(plain[0, 6])
    assert early != eos
    several = ended(0, None, ParallelPlan(), [eos, early])
    assert several[0, 6:].tolist() == [early] + [2] * (several.shape[1] - 7)


def test_kept_keys_are_used(monkeypatch):
    """Without them every token would be computed from the whole text: the same tokens."""
    trainer = trainer_of("llama", ParallelPlan())
    shown: list[int] = []
    inner = trainer._logits

    def noting(given: dict[str, Any]) -> Tensor:
        shown.append(given["input_ids"].shape[1])
        return inner(given)

    monkeypatch.setattr(trainer, "_logits", noting)
    kept = trainer.generate(prompt(), max_new_tokens=4)
    assert shown == [6, 1, 1, 1]
    monkeypatch.setattr(trainer, "_accepted", trainer._accepted - {*CACHE_NAMES})
    assert torch.equal(trainer.generate(prompt(), max_new_tokens=4), kept)
    assert shown[4:] == [6, 7, 8, 9]


def test_refusals():
    trainer = trainer_of("llama", ParallelPlan())
    for given, options, words in (
        (prompt()[0], {}, ("rows, T",)),
        ({"tokens": prompt()}, {}, ("tokens",)),
        (prompt(), {"max_new_tokens": 0}, ("max_new_tokens", "0")),
        (prompt(), {"temperature": -1.0}, ("temperature", "-1.0")),
        ({**padded(), "attention_mask": torch.zeros(3, 6)}, {}, ("attention_mask", "left")),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            trainer.generate(given, **options)
        assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises(ValueError, match="BertForMaskedLM"):
        trainer_of("bert", ParallelPlan()).generate(prompt())
    assert GenerationOptions().max_new_tokens == 20


def answered(rank: int, group: object, plan: ParallelPlan) -> list[Tensor]:
    trainer = trainer_of("t5", plan)
    given = {"input_ids": prompt(), "attention_mask": torch.ones(3, 6, dtype=torch.long)}
    given["attention_mask"][1, 4:] = 0
    return [
        trainer.generate(given, max_new_tokens=NEW),
        trainer.generate(given, max_new_tokens=NEW, **SAMPLED),
    ]


def test_an_encoder_and_a_decoder_answer_as_in_transformers_on_every_layout(world):
    plain, sampled = answered(0, None, ParallelPlan())
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[1, 4:] = 0
    expected = reference("t5", {"input_ids": prompt(), "attention_mask": mask})
    assert torch.equal(plain, expected)
    assert not torch.equal(sampled, plain)
    for found in world(2).run(answered, PLANS["pp"]):
        assert all(map(torch.equal, found, (plain, sampled)))
