"""Models of transformers whose rows ranks share out compute what they compute alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.comm.collectives.transport import run_virtual
from pyops.context_parallel import ContextRanks
from pyops.hf import share_rows
from tests.grids import full
from tests.parallel.tiny_transformers import MODELS

pytestmark = pytest.mark.cpu_only

B, T = 2, 16


def _text() -> tuple[Tensor, Tensor]:
    text = torch.randint(1, 60, (B, T + 1), generator=torch.Generator().manual_seed(2))
    return text[:, :-1], text[:, 1:]


def _made(name: str) -> nn.Module:
    options: dict[str, Any] = {"attn_pdrop": 0.0} if name == "gpt2" else {}
    if name == "mistral":
        options["sliding_window"] = 5
    torch.manual_seed(1)
    return MODELS[name](**options).double().eval()


def _gradients(model: nn.Module, targets: Tensor) -> dict[str, Tensor]:
    tokens, _ = _text()
    logits = model(input_ids=tokens).logits
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    total.backward()
    return {"loss": total.detach(), **{n: p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize(
    ("name", "method", "order"),
    [
        ("llama", "ring", "zigzag"),
        ("gpt2", "gather", "striped"),
        ("mistral", "ulysses", "zigzag"),
        full("qwen3", "ring", "contiguous"),
        full("gemma2", "ring", "zigzag"),
        full("phi3", "gather", "zigzag"),
        full("gpt-neox", "ring", "zigzag"),
    ],
)
def test_ranks_compute_what_one_does(name: str, method: str, order: str) -> None:
    _, targets = _text()
    expected = _gradients(_made(name), targets)
    models = [_made(name) for _ in range(2)]

    def body(transport: Any) -> dict[str, Tensor]:
        model = models[transport.rank]
        context = share_rows(model, ContextRanks.of(transport, method=method), order=order)
        return _gradients(model, context.row(T).shard(targets))

    found = run_virtual(2, body)
    for key, whole in expected.items():
        total = sum(each[key] for each in found)
        assert float((total - whole).norm()) < 1e-5 * float(whole.norm()), key
    assert float(expected["loss"]) > 1.0


def test_refusals_say_why() -> None:
    def body(transport: Any) -> None:
        ranks = ContextRanks.of(transport)
        model = _made("llama")
        share_rows(model, ranks)
        tokens, _ = _text()
        for given, words in (
            ({"labels": tokens}, "labels is given"),
            ({"attention_mask": torch.zeros_like(tokens)}, "attention_mask leaves tokens out"),
        ):
            with pytest.raises(ValueError, match=words):
                model(input_ids=tokens, **given)
        with pytest.raises(ValueError, match="15 tokens can't be shared out zigzag"):
            model(input_ids=tokens[:, :15])
        layer: Any = model.model.layers[1].self_attn
        layer.forward = lambda hidden_states, **options: (hidden_states, None)
        with pytest.raises(RuntimeError, match="3 of 4 layers of LlamaForCausalLM came to"):
            model(input_ids=tokens)
        with pytest.raises(ValueError, match=r"attn_pdrop of GPT2LMHeadModel is 0\.1"):
            share_rows(MODELS["gpt2"](), ranks)
        with pytest.raises(ValueError, match="takes no input_ids and position_ids"):
            share_rows(MODELS["bloom"](), ranks)

    run_virtual(2, body)
