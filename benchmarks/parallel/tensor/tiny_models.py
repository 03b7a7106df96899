"""Every model class of transformers, made small: two layers of width 16, by the names that
configurations use for sizes.

for name in names():
    model = tiny(name)
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

__all__ = ["HEADS", "names", "tiny"]

HEADS = 4
LARGEST = 65_000_000  # parameters
DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "num_hidden_groups",
    "vocab_size",
    "image_size",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
)
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "embed_dim",
            "encoder_hidden_size",
            "decoder_hidden_size",
        ),
        16,
    ),
    **dict.fromkeys(
        (
            "embedding_size",
            "word_embed_proj_dim",
            "projection_dim",
            "hidden_dim_size",
            "emb_dim",
            "d_embed",
        ),
        16,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "n_inner",
            "ffn_hidden_size",
        ),
        24,
    ),
    **dict.fromkeys(
        ("d_ff", "hidden_dim", "dim_feedforward", "d_inner", "mlp_dim", "moe_intermediate_size"), 24
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_hidden_groups"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), HEADS
    ),
    **dict.fromkeys(("decoder_attention_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx"), 32
    ),
    "vocab_size": 67,
    "max_source_positions": 16,
    "num_mel_bins": 8,
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sliding_window": 8,
    "type_vocab_size": 2,
    "rotary_dim": 4,
    "relative_attention_num_buckets": 6,
    "num_labels": 3,
    "vision_feature_layer": -1,
    "vocab_size_per_layer_input": 67,
    "hidden_size_per_layer_input": 4,
    "num_kv_shared_layers": 0,
    "entity_vocab_size": 67,
}


MISSING = {  # where a configuration says nothing of its own
    "head_dim": 4,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts": 4,
    "prediction_length": 4,
}
FITTING: dict[str, dict[str, Any]] = {  # sizes that must fit one another
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Mamba2Config": {"num_heads": 8, "head_dim": 4, "n_groups": 2},
    "BambaConfig": {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "Gemma4AssistantConfig": {"hidden_size_per_layer_input": 0},
    "ReformerConfig": {"axial_pos_embds_dim": [8, 8], "axial_pos_shape": [4, 8]},
}  # fmt: skip


def names() -> list[str]:
    """Of all model classes that transformers exports, those with a configuration and a forward;
    bases are left out."""
    import transformers
    from transformers import PreTrainedModel

    found = []
    for name in sorted(dir(transformers)):
        if name.startswith("Auto") or name.endswith(
            ("PreTrainedModel", "Config", "Processor", "ProcessorPil", "Tokenizer")
        ):
            continue  # the latter are not even imported
        kind = getattr(transformers, name, None)
        if (
            not inspect.isclass(kind)
            or not issubclass(kind, PreTrainedModel)
            or kind.config_class is None
        ):
            continue
        if kind.forward is not PreTrainedModel.forward:
            found.append(name)
    return found


def tiny(name: str, **changed: Any) -> nn.Module:
    """The model class of that name, in two layers, in evaluation mode. changed: of the
    configuration, beside SIZES.

    Where a configuration can't be so small, its widths, or all of its sizes, are the usual ones.
    Raises whatever the configuration, or the model, raises with the smallest sizes where it can't
    be made so either.
    """
    import transformers

    kind = getattr(transformers, name)
    reasons: list[Exception] = []
    for sizes in (
        SIZES,
        {**SIZES, **{f"{key}?": value for key, value in MISSING.items()}},
        {k: SIZES[k] for k in DEPTHS},
        {},
    ):
        try:
            config = tiny_config(kind.config_class, sizes=sizes, **changed)
            with torch.device("meta"):
                parameters = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
            if parameters > LARGEST:
                raise ValueError(f"{parameters:,} parameters even so")
            torch.manual_seed(1)
            model: nn.Module = kind(config)
            return model.eval()
        except Exception as error:  # of each class something else
            reasons.append(error)
            if isinstance(error, ImportError):
                break
    raise reasons[0]


def tiny_config(kind: Any, *, sizes: dict[str, Any] = SIZES, **changed: Any) -> Any:
    """A configuration of this class with every size that it has, and those of the configurations
    within it, made small."""
    usual = kind()
    arguments: dict[str, Any] = {}
    parts = {key: value for key, value in getattr(kind, "sub_configs", {}).items()}
    vocabulary = sizes.get("vocab_size", _value(usual, "vocab_size"))
    for key in {**vars(usual), **dict.fromkeys(usual.attribute_map)}:
        value = _value(usual, key)
        if value is None and f"{key}?" in sizes:
            arguments[key] = sizes[f"{key}?"]
        elif key in parts:
            if value is not None:
                part = type(value)
                arguments[key] = tiny_config(part, sizes=sizes).to_dict()
        elif (
            key.endswith("_token_id")
            and isinstance(value, int)
            and key not in sizes
            and vocabulary
            and value >= vocabulary
        ):
            arguments[key] = 5 + sum(map(ord, key)) % 50
        elif (
            key in sizes
            and (value is None or type(value) is type(sizes[key]))
            and (value is not None or "_token_id" in key or key == "vocab_size")
        ):
            arguments[key] = sizes[key]
    groups = _value(usual, "num_key_value_heads")
    if (
        "num_attention_heads" in sizes
        and isinstance(groups, int)
        and groups == usual.num_attention_heads
    ):
        arguments["num_key_value_heads"] = HEADS
    return kind(
        **{
            **arguments,
            **(FITTING.get(kind.__name__, {}) if sizes.get("hidden_size") else {}),
            **changed,
        }
    )


def _value(config: Any, key: str) -> Any:
    """None also for what differs between layers, of which a configuration tells no single value."""
    try:
        return getattr(config, key, None)
    except Exception:
        return None
