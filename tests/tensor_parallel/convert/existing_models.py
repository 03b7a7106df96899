"""Small transformers of other libraries, with inputs, for tests that make them parallel: drawn
anew, biases and norms too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers  # noqa: F401 - where it is missing, these tests are left out as a whole
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MODELS", "PLAN", "Mixed", "build"]

Inputs = dict[str, Any]
V = 51  # which neither 2 nor 4 ranks divide


def build(name: str, *, dropout: float = 0.0, spread: float = 0.25) -> tuple[nn.Module, Inputs]:
    """A model and the keyword arguments of a forward whose result has `.loss` and `.logits`; the
    same every time."""
    torch.manual_seed(3)
    model, inputs = MODELS[name](dropout)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * spread)
    return model.train(), inputs


def _tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(1, V, shape, generator=torch.Generator().manual_seed(seed))


def _mask(B: int, T: int) -> Tensor:
    """The last sequence ends early."""
    mask = torch.ones(B, T, dtype=torch.long)
    mask[-1, T - 2 :] = 0
    return mask


def _labelled(B: int, T: int) -> Inputs:
    ids = _tokens(B, T)
    return {
        "input_ids": ids,
        "attention_mask": _mask(B, T),
        "labels": ids.masked_fill(_mask(B, T) == 0, -100),
    }


def gpt2(dropout: float, *, heads: int = 4) -> tuple[nn.Module, Inputs]:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=V,
        n_positions=8,
        n_embd=6 * heads,
        n_layer=2,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config), _labelled(3, 7)


def _llama(kind: str, dropout: float, **options: Any) -> tuple[nn.Module, Inputs]:
    import importlib

    found = importlib.import_module(f"transformers.models.{kind.lower()}.modeling_{kind.lower()}")
    config = getattr(found, f"{kind}Config")(
        vocab_size=V,
        hidden_size=24,
        intermediate_size=30,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attention_dropout=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        **options,
    )
    return getattr(found, f"{kind}ForCausalLM")(config), _labelled(3, 7)


def bert(dropout: float) -> tuple[nn.Module, Inputs]:
    from transformers.models.bert.modeling_bert import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=V,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=30,
        pad_token_id=0,
        max_position_embeddings=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    inputs = _labelled(3, 7)
    inputs["input_ids"][0, 2] = (
        config.pad_token_id
    )  # one that is attended to: its row gets no gradient from here
    return BertForMaskedLM(config), inputs


def t5(dropout: float, *, gated: bool = False) -> tuple[nn.Module, Inputs]:
    from transformers.models.t5.modeling_t5 import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=V,
        d_model=24,
        d_kv=5,
        d_ff=30,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=6,
        relative_attention_max_distance=5,
        dropout_rate=dropout,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=not gated,
        decoder_start_token_id=0,
        use_cache=False,
    )
    inputs = {
        "input_ids": _tokens(3, 6),
        "attention_mask": _mask(3, 6),
        "labels": _tokens(3, 5, seed=2),
    }
    return T5ForConditionalGeneration(config), inputs


def vit(dropout: float) -> tuple[nn.Module, Inputs]:
    from transformers.models.vit.modeling_vit import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=30,
        image_size=8,
        patch_size=4,
        num_channels=2,
        num_labels=5,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    images = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    return ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.tensor([0, 3, 4]),
    }


class Result(dict[str, Tensor]):
    """As of transformers: .loss and .logits."""

    __getattr__ = dict.__getitem__


class Torch(nn.Module):
    """torch.nn's encoder and decoder, with masks of both sorts."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        shared: dict[str, Any] = {"dim_feedforward": 30, "dropout": dropout}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(24, 4, batch_first=True, **shared),
            2,
            enable_nested_tensor=True,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(24, 4, norm_first=True, activation="gelu", **shared), 1
        )

    def forward(self, x: Tensor, padding: Tensor) -> Result:
        memory = self.encoder(x, src_key_padding_mask=padding)
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.decoder(
            x.transpose(0, 1),
            memory.transpose(0, 1),
            tgt_mask=causal,
            memory_key_padding_mask=padding,
        )
        return Result(loss=(y * x.transpose(0, 1)).mean(), logits=y)


def plain_torch(dropout: float) -> tuple[nn.Module, Inputs]:
    x = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(1))
    return Torch(dropout), {"x": x, "padding": _mask(3, 7) == 0}


class Mixer(nn.Module):
    """Somebody's own attention: two kv heads, a norm of each head's query."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = 4, 2, 5
        self.queries = nn.Linear(24, 20)
        self.memory = nn.ModuleDict({"k": nn.Linear(24, 10, bias=False), "v": nn.Linear(24, 10)})
        self.norm = nn.LayerNorm(5)
        self.out = nn.Linear(20, 24)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.norm(self.queries(x).view(B, T, self.n_head, self.head_dim)).transpose(1, 2)
        k, v = (
            layer(x).view(B, T, self.n_kv_head, self.head_dim).transpose(1, 2)
            for layer in self.memory.values()
        )
        y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mixed(nn.Module):
    """Somebody's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, 24)
        self.stack = nn.ModuleList(
            nn.ModuleDict(
                {
                    "mix": Mixer(),
                    "norm": nn.LayerNorm(24),
                    "ffn": nn.Sequential(
                        nn.Linear(24, 30), nn.ReLU(), nn.Linear(30, 24, bias=False)
                    ),
                }
            )
            for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(24))
        self.head = nn.Linear(24, V, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Result:
        x = self.words(tokens)
        for block in self.stack:
            x = x + block["mix"](x)
            x = x + block["ffn"](block["norm"](x))
        logits = self.head(x * self.scale)
        return Result(
            loss=functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits=logits
        )


PLAN = {
    "words": "vocabulary",
    "head": "logits",
    "mix": "attention",
    "mix.norm": "partial",
    "queries": "columns",
    "memory.*": "columns",
    "mix.out": "rows",
    "ffn.0": "columns",
    "ffn.2": "rows",
}

MODELS: dict[str, Callable[[float], tuple[nn.Module, Inputs]]] = {
    "gpt2": gpt2,
    "gpt2, 5 heads": lambda dropout: gpt2(dropout, heads=5),
    "llama": lambda dropout: _llama(
        "Llama", dropout, attention_bias=True, tie_word_embeddings=False
    ),
    "mistral": lambda dropout: _llama("Mistral", dropout),
    "qwen2": lambda dropout: _llama("Qwen2", dropout),
    "qwen3": lambda dropout: _llama("Qwen3", dropout, head_dim=8, tie_word_embeddings=True),
    "bert": bert,
    "t5": t5,
    "t5, gated": lambda dropout: t5(dropout, gated=True),
    "vit": vit,
    "torch.nn": plain_torch,
    "own": lambda dropout: (Mixed(), {"tokens": _tokens(3, 7)}),
}
