"""Parameters and operations of a model, against models that are there and published counts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers

from pyops.models import GPT, GPTConfig
from pyops.plan import ModelShape, PlanError
from tests.plan.shapes import LLAMA_8B, TINY, llama, mpt

pytestmark = pytest.mark.cpu_only

CONFIGS = {
    "GPT-2": GPTConfig(vocab_size=61, sequence_length=24, num_layers=3, num_heads=2, dim=16),
    "own head": GPTConfig(
        vocab_size=61, sequence_length=24, num_layers=2, num_heads=4, dim=32, tied_head=False
    ),
    "Llama": GPTConfig(
        vocab_size=61,
        sequence_length=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        dim=32,
        hidden=72,
        norm="rmsnorm",
        activation="swiglu",
        positions="rotary",
        bias=False,
        tied_head=False,
    ),
    "wide heads, biases": GPTConfig(
        vocab_size=61,
        sequence_length=24,
        num_layers=2,
        num_heads=4,
        head_dim=16,
        dim=32,
        norm="rmsnorm",
        activation="swiglu",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_a_gpt(name: str):
    model = GPT(CONFIGS[name], device="meta", seed=None)
    counted = sum(p.numel() for p in model.parameters())
    assert ModelShape.of_gpt(CONFIGS[name]).num_parameters == counted


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gpt2", {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 12}),
        ("llama", {"num_key_value_heads": 2}),
        ("mistral", {"num_key_value_heads": 2, "head_dim": 16}),
        ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ],
)
def test_parameters_are_those_of_transformers(kind: str, sizes: dict[str, object]):
    usual = (
        {}
        if kind == "gpt2"
        else {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 56,
            "max_position_embeddings": 64,
        }
    )
    config = transformers.AutoConfig.for_model(kind, vocab_size=50, **usual, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = ModelShape.of_config(json.loads(config.to_json_string()))
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        # mosaicml/llm-foundry, scripts/train/benchmarking/README.md, NumParams
        (mpt(24, 1536, 12, sequence=2048), 760470528),
        (mpt(32, 4096, 32, sequence=2048), 6658859008),
        (mpt(32, 4096, 32, sequence=65536), 6918905856),
        (mpt(80, 8192, 64, sequence=2048), 64862437376),
    ],
)
def test_parameters_are_those_published(shape: ModelShape, published: int):
    assert shape.num_parameters == published


def test_operations_of_a_token_are_those_of_torchtitan():
    """57.9 GFLOP for Llama 3 8B at 8,192 tokens, of which 5,762 and 6,667 tokens a second are 33.7
    and 39.0 % of 989 TFLOP/s."""
    assert LLAMA_8B.num_parameters == 8030261248
    assert LLAMA_8B.operations() == pytest.approx(57.9e9, rel=1e-3)
    for rate, published in ((5762, 33.7), (6667, 39.0), (5605, 32.8), (6514, 38.1)):
        assert 100 * rate * LLAMA_8B.operations() / 989e12 == pytest.approx(published, abs=0.06)
    # Megatron-Bridge halves the scores: 14,451 tokens a second are 744 TFLOP/s.
    assert 14451 * LLAMA_8B.operations(causal=True) / 1e12 == pytest.approx(744, abs=0.5)


def test_llama_counts():
    assert llama(80, 8192, 64, 28672).num_parameters == pytest.approx(70.6e9, rel=1e-3)
    assert llama(126, 16384, 128, 53248).num_parameters == pytest.approx(405.8e9, rel=3e-4)


def test_a_folder_is_read(tmp_path):
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50)
    config.save_pretrained(tmp_path)
    shape = ModelShape.of_folder(tmp_path)
    of_file = ModelShape.of_folder(tmp_path / "config.json")
    assert (shape.name, of_file.name) == (tmp_path.name, "config")
    assert replace(of_file, name=shape.name) == shape
    assert (shape.num_layers, shape.dim, shape.learned_positions) == (2, 16, True)


def test_longer_rows_than_positions_are_refused():
    assert LLAMA_8B.with_sequence(131072).sequence_length == 131072
    assert TINY.with_sequence(16).sequence_length == 16
    with pytest.raises(PlanError, match=r"sequence_length is 64, .* has 32; ask for that many"):
        TINY.with_sequence(64)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; give a whole number, 1 or more"),
        ({"num_layers": True}, "num_layers is True; it must be of type int"),
        ({"dim": -64}, "dim is -64; give a whole number, 1 or more"),
        ({"num_heads": 5}, "num_heads is 5, which does not divide dim = 64"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3, which does not divide num_heads = 4"),
        ({"hidden": 1.5}, "hidden is 1.5; it must be of type int"),
        ({"experts": 8}, "a model has no experts = 8; it has num_layers"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(values: dict[str, object], message: str):
    numbers = {
        "num_layers": 2,
        "dim": 64,
        "num_heads": 4,
        "vocab_size": 96,
        "sequence_length": 32,
    }
    with pytest.raises(PlanError, match=message):
        ModelShape.of_numbers({**numbers, **values})


def test_a_missing_size_is_named():
    with pytest.raises(PlanError, match="a model needs dim; give it a whole number"):
        ModelShape.of_numbers({"num_layers": 2})


def test_an_unknown_kind_of_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "jamba"}')
    with pytest.raises(PlanError, match="model_type 'jamba', whose costs are not known; known"):
        ModelShape.of_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match="is no JSON"):
        ModelShape.of_folder(tmp_path)
    with pytest.raises(PlanError, match=r"can't be read: .*; name a Hugging Face folder"):
        ModelShape.of_folder(tmp_path / "nowhere")
