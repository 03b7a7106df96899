"""The table of rotary positions: its angles, and that it is made wherever parameters are drawn."""

from __future__ import annotations

import pytest
import torch

from pyops.models import BERT, GPT, BERTClassifier, BERTConfig, GPTConfig
from pyops.models.rotary import Rotary

pytestmark = pytest.mark.cpu_only

SIZES = {
    "vocab_size": 11,
    "sequence_length": 8,
    "num_layers": 2,
    "num_heads": 2,
    "dim": 12,
    "positions": "rotary",
}


def make(name: str, seed: int | None) -> GPT | BERT | BERTClassifier:
    if name == "gpt":
        return GPT(GPTConfig(**SIZES), seed=seed)
    config = BERTConfig(**SIZES, pooled_head=False)
    return (
        BERT(config, seed=seed)
        if name == "bert"
        else BERTClassifier(config, num_labels=3, seed=seed)
    )


def test_pairs_turn_by_their_own_angle_with_each_place():
    cos, sin = Rotary(5, 6, theta=1000.0)(4)
    turned = torch.complex(cos.double(), sin.double())
    for pair, angle in enumerate((1.0, 0.1, 0.01)):
        wanted = torch.exp(1j * angle * torch.arange(4, dtype=torch.float64))
        assert (turned[:, pair] - wanted).abs().max() < 1e-7


@pytest.mark.parametrize("name", ["gpt", "bert", "classifier"])
def test_drawing_all_modules_one_by_one_makes_the_table_too(name):
    wanted, model = make(name, seed=3), make(name, seed=None)
    assert not any("position" in own for own, _ in model.named_parameters())
    for value in (*model.parameters(), *model.buffers()):
        torch.nn.init.constant_(value, torch.nan)
    for module in model.modules():
        model.initialize(3, only=module)
    for (own, value), other in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(value, other), own
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens), wanted(tokens))


@pytest.mark.parametrize("config", [GPTConfig, BERTConfig])
def test_what_does_not_turn_is_refused(config):
    with pytest.raises(ValueError, match=r"a head is 3 wide.* num_heads 4.*make that even"):
        config(**SIZES | {"num_heads": 4})
    with pytest.raises(ValueError, match=r"rotary_theta is -1\.0; it must be more than 0"):
        config(**SIZES, rotary_theta=-1.0)
    with pytest.raises(ValueError, match="positions is 'none'; choose one of learned, rotary"):
        config(**SIZES | {"positions": "none"})
