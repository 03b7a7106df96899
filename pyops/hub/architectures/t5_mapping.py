"""T5 (T5ForConditionalGeneration), 1.0 with relu and 1.1 with gated gelu: encoder and decoder,
relative positions, RMSNorm."""

from __future__ import annotations

from typing import Any

from pyops.hub.architectures.architecture import Architecture
from pyops.hub.config_fields import ConfigFields
from pyops.hub.weight_packing import AttentionShape, Grouped, Packing, Same, Stacked
from pyops.models import T5, T5Config

__all__ = ["T5_MODEL"]


def _stack(part: str, *, mlp: int) -> dict[str, Packing]:
    """Names of the encoder's or decoder's layers; the MLP is part `mlp` of a layer in the file."""
    ours, layer = f"{part}.blocks.{{i}}.", f"{part}.block.{{i}}.layer."
    own = f"{layer}0.SelfAttention."
    return {
        f"{part}.relative.weight": Same(
            f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ),
        f"{ours}norm1.weight": Same(f"{layer}0.layer_norm.weight"),
        f"{ours}attention.qkv.weight": Grouped(
            f"{own}q.weight", f"{own}k.weight", f"{own}v.weight"
        ),
        f"{ours}attention.output.weight": Same(f"{own}o.weight"),
        f"{ours}norm2.weight": Same(f"{layer}{mlp}.layer_norm.weight"),
        f"{ours}mlp.up.weight": Same(f"{layer}{mlp}.DenseReluDense.wi.weight"),
        f"{ours}mlp.down.weight": Same(f"{layer}{mlp}.DenseReluDense.wo.weight"),
        f"{part}.norm.weight": Same(f"{part}.final_layer_norm.weight"),
    }


CROSS = "decoder.block.{i}.layer.1."
NAMES = {
    "embedding.token.weight": Same("shared.weight"),
    **_stack("encoder", mlp=1),
    **_stack("decoder", mlp=2),
    "decoder.blocks.{i}.norm_cross.weight": Same(CROSS + "layer_norm.weight"),
    "decoder.blocks.{i}.cross.q.weight": Same(CROSS + "EncDecAttention.q.weight"),
    "decoder.blocks.{i}.cross.kv.weight": Grouped(
        CROSS + "EncDecAttention.k.weight", CROSS + "EncDecAttention.v.weight"
    ),
    "decoder.blocks.{i}.cross.output.weight": Same(CROSS + "EncDecAttention.o.weight"),
    "head.output.weight": Same("lm_head.weight"),
}
GATED_NAMES = {
    **NAMES,
    **{
        f"{part}.blocks.{{i}}.mlp.up.weight": Stacked(
            *(f"{part}.block.{{i}}.layer.{mlp}.DenseReluDense.wi_{j}.weight" for j in (0, 1))
        )
        for part, mlp in (("encoder", 1), ("decoder", 2))
    },
}
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gated-gelu": "gated_gelu", "gated-silu": "swiglu"}
# dense_act_fn and is_gated_act, as transformers derives them
COMPUTED = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gated_gelu": ("gelu_new", True),
    "swiglu": ("silu", True),
}


def read(fields: ConfigFields, names: frozenset[str]) -> T5Config:
    tied = fields.flag("tie_word_embeddings", True)
    activation = fields.choice("feed_forward_proj", ACTIVATIONS, "relu")
    # Both follow from feed_forward_proj, unless a file says otherwise: then it is they that
    # transformers computes.
    function, gated = COMPUTED[activation]
    fields.fixed(dense_act_fn=function, is_gated_act=gated, is_encoder_decoder=True)
    layers = fields.integer("num_layers", of="tensors")
    padding = fields.integer("pad_token_id", 0, least=0, optional=True)
    return T5Config(
        vocab_size=fields.integer("vocab_size"),
        num_layers=layers,
        num_heads=fields.integer("num_heads"),
        num_decoder_layers=fields.integer(
            "num_decoder_layers", layers, optional=True, of="tensors"
        ),
        dim=fields.integer("d_model"),
        head_dim=fields.integer("d_kv"),
        hidden=fields.integer("d_ff"),
        activation=activation,
        num_buckets=fields.integer("relative_attention_num_buckets", 32),
        max_distance=fields.integer("relative_attention_max_distance", 128, most=1 << 31),
        norm_eps=fields.number("layer_norm_epsilon", 1e-6),
        # 1.1 says that nothing is tied, which also means that the head's input is not scaled.
        tied_head=tied or "lm_head.weight" not in names,
        scaled_head=fields.flag("scale_decoder_outputs", tied),
        dropout=fields.probability("dropout_rate", 0.1),
        attention_dropout=fields.probability("dropout_rate", 0.1),
        start_token=fields.integer("decoder_start_token_id", padding, least=0, optional=True),
    )


def write(config: T5Config) -> dict[str, Any]:
    known, config = {own: name for name, own in ACTIVATIONS.items()}, config.resolved()
    return {
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "d_model": config.dim,
        "num_decoder_layers": config.num_decoder_layers,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_width,
        "feed_forward_proj": known[config.activation],
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "layer_norm_epsilon": config.norm_eps,
        "dropout_rate": config.dropout,
        "is_encoder_decoder": True,
        "tie_word_embeddings": config.tied_head and config.scaled_head,
        "scale_decoder_outputs": config.scaled_head,
        "decoder_start_token_id": config.start_token,
        "pad_token_id": 0,
    }


T5_MODEL = Architecture(
    kind="t5",
    classes=("T5ForConditionalGeneration",),
    model=T5,
    config=T5Config,
    names=lambda config: GATED_NAMES if config.gated else NAMES,
    read=read,
    write=write,
    heads=lambda config: AttentionShape(config.num_heads, config.num_heads, config.head_width),
    copies={
        "lm_head.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    },
    ignored=(r"EncDecAttention\.relative_attention_bias\.weight$",),
)
