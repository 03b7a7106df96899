"""Tiny models of transformers, the same in exact float64, and what they compute."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from pyops.hf import kernels

VOCABULARY, LENGTH = 61, 7
ALL = tuple(kind for kind in kernels.OPS if kind != kernels.LOSS)
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
DECODER = {**COMMON, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 0.03}


def made(name: str) -> Any:
    """A tiny model with odd norms, so that neither eps nor a weight is what a default would be."""
    import transformers

    torch.manual_seed(0)
    configs = {
        "LlamaForCausalLM": ("LlamaConfig", DECODER),
        "Qwen3ForCausalLM": ("Qwen3Config", DECODER),
        "Phi3ForCausalLM": ("Phi3Config", DECODER),
        "GemmaForCausalLM": ("GemmaConfig", DECODER),
        "Olmo2ForCausalLM": ("Olmo2Config", DECODER),
        "GPT2LMHeadModel": (
            "GPT2Config",
            {
                "vocab_size": VOCABULARY,
                "n_positions": 16,
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 4,
                "layer_norm_epsilon": 0.03,
                "bos_token_id": 0,
                "eos_token_id": 0,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
        ),
        "BertForMaskedLM": (
            "BertConfig",
            {
                **COMMON,
                "layer_norm_eps": 0.03,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
        ),
        "T5ForConditionalGeneration": (
            "T5Config",
            {
                "vocab_size": VOCABULARY,
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 2,
                "num_heads": 4,
                "feed_forward_proj": "gated-gelu",
                "layer_norm_epsilon": 0.03,
                "dropout_rate": 0.0,
                "decoder_start_token_id": 0,
            },
        ),
    }
    config, options = configs[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**options))
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.1 * torch.randn(each.shape))
    return model.eval()


class ExactRMSNorm(nn.Module):
    """What transformers' norms mean, in the dtype of x: theirs are in float32, whatever x is."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.weight, self.offset = of.weight, 1.0 if type(of).__name__ == "GemmaRMSNorm" else 0.0
        self.eps = of.eps if self.offset else of.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return (
            x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (self.weight + self.offset)
        )


def exact(model: Any) -> Any:
    """A float64 copy whose RMS norms are computed in float64."""
    found = copy.deepcopy(model).double()
    for name, module in list(found.named_modules()):
        if type(module).__name__.endswith("RMSNorm") or type(module).__name__ == "T5LayerNorm":
            parent, _, key = name.rpartition(".")
            setattr(found.get_submodule(parent), key, ExactRMSNorm(module))
    return found


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (3, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, :4], labels[2, 3] = -100, -100
    return {"input_ids": ids, "labels": labels}


def logits_and_gradients(model: Any) -> dict[str, Tensor]:
    """Of a loss of the logits that is not transformers', which is float32 for float64 logits."""
    model.zero_grad()
    with torch.enable_grad():
        logits = model(**batch()).logits
        weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
        (logits.square() * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **{name: g.clone() for name, g in gradients.items()}}


def assert_no_worse(
    found: dict[str, Tensor], plain: dict[str, Tensor], reference: dict[str, Tensor]
) -> None:
    """The rule of tests.tolerance for the relative errors of a whole model's tensors taken
    together: a single element's error is what those of many layers happened to add up to."""
    assert set(found) == set(plain) == set(reference)

    def error(given: dict[str, Tensor]) -> Tensor:
        each = [
            (x - wanted).norm() / wanted.norm()
            for x, wanted in ((given[name].double(), x) for name, x in reference.items())
            if wanted.norm() > 1e-9  # keys' biases have no gradient
        ]
        return torch.stack(each).norm()

    eps = torch.finfo(next(iter(found.values())).dtype).eps
    assert error(found) <= 2 * error(plain) + eps
