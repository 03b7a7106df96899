"""A student of some of a teacher's layers: which, what is shared, what runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pyops.distill import freeze, student_from_layers
from pyops.models import BERT, GPT, BERTConfig, GPTConfig

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
TOKENS = torch.arange(24).view(2, 12)


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(**SMALL, num_attention_heads=2, max_position_embeddings=32)
    return {
        "gpt": GPT(GPTConfig(vocab_size=32, sequence_length=16, num_layers=4, num_heads=2, dim=16)),
        "bert": BERT(
            BERTConfig(vocab_size=32, sequence_length=16, num_layers=4, num_heads=2, dim=16)
        ),
        "llama": transformers.LlamaForCausalLM(llama),
    }


def blocks(model: Any) -> nn.ModuleList:
    return model.model.layers if hasattr(model, "model") else model.blocks


@pytest.mark.parametrize("kind", ["gpt", "bert", "llama"])
def test_layers_are_copies_of_the_teachers(kind: str):
    teacher: Any = freeze(models()[kind])
    student: Any = student_from_layers(teacher, keep=[0, 3])
    assert len(blocks(student)) == 2
    assert len(blocks(teacher)) == 4
    for i, j in enumerate((0, 3)):
        for own, other in zip(
            blocks(student)[i].parameters(), blocks(teacher)[j].parameters(), strict=True
        ):
            assert torch.equal(own, other)
            assert own.data_ptr() != other.data_ptr()
    count = "num_hidden_layers" if kind == "llama" else "num_layers"
    assert getattr(student.config, count) == 2
    assert getattr(teacher.config, count) == 4
    assert student.training
    assert all(p.requires_grad for p in student.parameters())
    assert not any(p.requires_grad for p in teacher.parameters())
    found = student(TOKENS)
    logits = getattr(found, "logits", found)
    assert (logits[0] if isinstance(logits, tuple) else logits).shape == (2, 12, 32)


def test_a_student_of_all_layers_says_what_the_teacher_says():
    teacher = freeze(models()["gpt"])
    student = student_from_layers(teacher, keep=range(4)).eval()
    assert torch.equal(student(TOKENS), teacher(TOKENS))


def test_tied_parameters_stay_tied():
    student: Any = student_from_layers(models()["gpt"], keep=[1])
    assert student.head.output.weight is student.embedding.token.weight


def test_a_shortened_llama_generates_with_its_cache():
    student: Any = student_from_layers(models()["llama"], keep=[1, 2]).eval()
    assert [block.self_attn.layer_idx for block in blocks(student)] == [0, 1]
    with torch.no_grad():
        cached = student.generate(TOKENS[:1, :4], max_new_tokens=5, do_sample=False)
        plain = student.generate(TOKENS[:1, :4], max_new_tokens=5, do_sample=False, use_cache=False)
    assert torch.equal(cached, plain)


@pytest.mark.parametrize(
    ("keep", "says"),
    [([], "empty"), ([0, 4], "layer 4"), ([-1], "layer -1"), ([2, 1], "1 after 2"), ([1, 1], "1")],
)
def test_bad_numbers(keep: list[int], says: str):
    with pytest.raises(ValueError, match=says):
        student_from_layers(models()["gpt"], keep=keep)


def test_a_model_without_layers():
    with pytest.raises(ValueError, match="Linear has 0 lists"):
        student_from_layers(nn.Linear(2, 2), keep=[0])
