"""Longer tables of positions: old rows where places fall on them, models that run at the new length
and are saved with it, and what is refused before anything changes."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from pyops.attention import interpolate_positions
from pyops.models import BERT, GPT, BERTConfig, GPTConfig

pytestmark = pytest.mark.cpu_only

L = 9
SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def table_of(length: int, width: int = 3) -> nn.Module:
    module = nn.Module()
    module.wpe = nn.Embedding(length, width)
    return module


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=L, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def bert() -> nn.Module:
    config = transformers.BertConfig(**SIZES, intermediate_size=8, max_position_embeddings=L)
    return transformers.BertForMaskedLM(config).eval()


def roberta() -> nn.Module:
    config = transformers.RobertaConfig(
        **SIZES, intermediate_size=8, max_position_embeddings=L + 2, pad_token_id=1
    )
    return transformers.RobertaForMaskedLM(config).eval()


def opt() -> nn.Module:
    config = transformers.OPTConfig(
        **SIZES, ffn_dim=8, max_position_embeddings=L, word_embed_proj_dim=8, pad_token_id=1
    )
    return transformers.OPTForCausalLM(config).eval()


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=20,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        max_position_embeddings=L,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    return transformers.BartForConditionalGeneration(config).eval()


FAMILIES = (gpt2, bert, roberta, opt, bart)


def positions_of(model: nn.Module) -> list[Tensor]:
    names = ("wpe", "position_embeddings", "embed_positions")
    return [p for name, p in model.named_parameters() if name.split(".")[-2] in names]


@pytest.mark.parametrize("length", [L, L + 1, 2 * L - 1, 3 * L])
def test_rows_are_those_of_a_line_through_the_old_ones(length: int):
    model = table_of(L)
    old = model.wpe.weight.detach().double().numpy()
    interpolate_positions(model, length)
    new = model.wpe.weight
    assert new.shape == (length, 3)
    assert model.wpe.num_embeddings == length
    for i, row in enumerate(new.tolist()):
        place = i * (L - 1) / (length - 1)
        low = min(int(place), L - 2)
        for d in range(3):
            exact = old[low, d] + (old[low + 1, d] - old[low, d]) * (place - low)
            assert row[d] == pytest.approx(exact, rel=1e-6, abs=1e-7)
    # Where a place falls on an old row, it is that row to the bit.
    if (length - 1) % (L - 1) == 0:
        every = (length - 1) // (L - 1)
        assert new[::every].double().tolist() == old.tolist()
    assert new[-1].double().tolist() == old[-1].tolist()


def test_a_table_of_one_row_is_repeated():
    model = table_of(1)
    row = model.wpe.weight.detach().clone()
    interpolate_positions(model, 4)
    assert torch.equal(model.wpe.weight.detach(), row.expand(4, -1))


@pytest.mark.parametrize("make", FAMILIES)
def test_models_run_at_the_new_length_and_are_saved_with_it(make: Any, tmp_path: Path):
    torch.manual_seed(0)
    model = make()
    before = [table.detach().clone() for table in positions_of(model)]
    length = 2 * L - 1
    tokens = torch.randint(3, 20, (2, length))
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        model(input_ids=tokens)
    interpolate_positions(model, length)
    special = len(before[0]) - L
    for old, new in zip(before, positions_of(model), strict=True):
        assert torch.equal(new[:special], old[:special])  # rows that are no positions
        assert torch.equal(new[special::2], old[special:])
        assert new.requires_grad
        assert new.grad is None
    logits = model(input_ids=tokens).logits
    assert logits.shape == (2, length, 20)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(input_ids=tokens).logits, logits, rtol=1e-5, atol=1e-6)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        model(input_ids=torch.randint(3, 20, (2, length + 1)))


@pytest.mark.parametrize("make", [gpt2, bert])
def test_tokens_at_every_second_place_are_what_they_were(make: Any):
    torch.manual_seed(0)
    model = make()
    tokens = torch.randint(3, 20, (2, L))
    before = model(input_ids=tokens).logits
    interpolate_positions(model, 2 * L - 1)
    places = 2 * torch.arange(L).expand(2, -1)
    # Without a mask transformers takes the gaps for the borders of packed texts.
    seen = torch.ones_like(tokens)
    after = model(input_ids=tokens, position_ids=places, attention_mask=seen).logits
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
    close = model(input_ids=tokens).logits  # at the first places, which are nearer to each other
    assert not torch.allclose(close, before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_models_of_this_package(kind: str):
    shape: dict[str, Any] = {"vocab_size": 20, "sequence_length": L, "num_layers": 1, "dim": 8}
    shape |= {"num_heads": 2}
    model = GPT(GPTConfig(**shape)) if kind == "gpt" else BERT(BERTConfig(**shape))
    old = model.embedding.position.weight.detach().clone()
    other = copy.deepcopy(model)
    tokens = torch.randint(3, 20, (2, 2 * L - 1))
    with pytest.raises(ValueError, match="is longer than sequence_length"):
        model(tokens)
    interpolate_positions(model, 2 * L - 1)
    assert torch.equal(model.embedding.position.weight[::2], old)
    assert model.embedding.position.placements["weight"].global_shape == (2 * L - 1, 8)
    assert model.config.sequence_length == 2 * L - 1
    model(tokens)
    assert other.config.sequence_length == L


def rotary_of_this_package() -> nn.Module:
    return GPT(
        GPTConfig(
            vocab_size=20, sequence_length=L, num_layers=1, dim=8, num_heads=2, positions="rotary"
        )
    )


def with_a_mask() -> nn.Module:
    model = table_of(L)
    model.register_buffer("bias", torch.ones(L, L).tril())
    return model


def with_two_lengths() -> nn.Module:
    model = table_of(L)
    model.other = table_of(5)
    return model


@pytest.mark.parametrize(
    ("make", "length", "message"),
    [
        (lambda: table_of(L), L - 1, "length is 8, but the model has 9 positions"),
        (rotary_of_this_package, 20, "has no table of learned positions"),
        (lambda: nn.Linear(2, 2), 20, "has no table of learned positions"),
        (with_a_mask, 20, "the buffer .bias of shape [9, 9] has the length of the positions"),
        (with_two_lengths, 20, "several lengths: wpe 9, other.wpe 5"),
    ],
)
def test_refused_before_anything_changes(make: Any, length: int, message: str):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=re.escape(message)):
        interpolate_positions(model, length)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
