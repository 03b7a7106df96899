"""A plan for any transformer, guessed from its modules' names: often right, often near to it, as a
plan given by hand is.

It tries the check of `parallelize` on architectures for which there is no plan: what is guessed is
right, or it is refused.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["guessed"]

PARTS = {
    *(
        "q_proj",
        "k_proj",
        "v_proj",
        "query",
        "key",
        "value",
        "q",
        "k",
        "v",
        "q_lin",
        "k_lin",
        "v_lin",
        "to_q",
        "to_k",
        "to_v",
    ),
    *(
        "query_proj",
        "key_proj",
        "value_proj",
        "linear_q",
        "linear_k",
        "linear_v",
        "q_attn",
        "wq",
        "wk",
        "wv",
    ),
}
PACKED = {"qkv", "c_attn", "qkv_proj", "Wqkv", "in_proj", "attn_qkv", "Wi_qkv"}
BY_HEAD = {"query_key_value"}
OUT = {
    *(
        "o_proj",
        "out_proj",
        "dense",
        "o",
        "out_lin",
        "c_proj",
        "proj",
        "to_out",
        "out",
        "linear_out",
        "projection_layer",
        "wo",
    ),
    *("Wo", "attn_out", "projection"),
}
FIRST = {
    *(
        "fc1",
        "up_proj",
        "gate_proj",
        "c_fc",
        "lin1",
        "linear1",
        "wi",
        "wi_0",
        "wi_1",
        "w1",
        "w3",
        "dense_h_to_4h",
        "fc_in",
    ),
    *("intermediate_dense", "fc_1", "linear_in"),
}
BOTH = {"gate_up_proj", "Wi"}
SECOND = {
    *(
        "fc2",
        "down_proj",
        "c_proj",
        "lin2",
        "linear2",
        "wo",
        "w2",
        "dense_4h_to_h",
        "fc_out",
        "output_dense",
        "fc_2",
        "Wo",
    ),
    "linear_out",
}


def guessed(model: nn.Module) -> dict[str, str]:
    """{qualified name: kind}; empty where nothing looks like attention or an MLP."""
    plan: dict[str, str] = {}
    names = {name for name, _ in model.named_modules()}
    for name, module in model.named_modules():
        linears = {key for key, child in module.named_children() if _linear(child)}
        prefix = f"{name}." if name else ""
        if name and (len(linears & PARTS) >= 3 or linears & (PACKED | BY_HEAD)):
            plan.update(_attention(names, name, module))
        elif linears & (FIRST | BOTH) and linears & SECOND:
            kinds = {
                **dict.fromkeys(FIRST, "columns"),
                **dict.fromkeys(BOTH, "gate and up"),
                **dict.fromkeys(SECOND, "rows"),
            }
            plan.update({prefix + key: kinds[key] for key in sorted(linears) if key in kinds})
        elif (
            "dense" in linears
            and name.endswith(".intermediate")
            and f"{prefix[:-13]}output.dense" in names
        ):
            plan.update({f"{name}.dense": "columns", f"{prefix[:-13]}output.dense": "rows"})
    if plan:
        plan.update(_edges(model, plan))
    return plan


def _attention(names: set[str], name: str, module: nn.Module) -> dict[str, str]:
    found = {name: "attention"}
    kinds = {
        **dict.fromkeys(PARTS, "columns"),
        **dict.fromkeys(PACKED, "packed columns"),
        **dict.fromkeys(BY_HEAD, "head columns"),
        **dict.fromkeys(OUT, "rows"),
        "relative_attention_bias": "bias by head",
    }
    for key, child in module.named_modules():
        if child._parameters and (key or any(p is not None for p in child._parameters.values())):
            found[f"{name}.{key}" if key else name] = (
                kinds.get(key, "partial") if key else "attention"
            )
    after = f"{name.rpartition('.')[0]}.output.dense"
    if after in names and not any(key in OUT for key, _ in module.named_children()):
        found[after] = "head rows"
    return found


def _edges(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Embeddings of the vocabulary, the head, and lists of blocks."""
    found: dict[str, str] = {}
    sizes = {
        _vocabulary(getattr(model, "config", None)),
        _vocabulary(getattr(getattr(model, "config", None), "text_config", None)),
    }
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding)
            and module.num_embeddings in sizes - {None}
            and name not in plan
        ):
            found[name] = "vocabulary"
        elif type(module) is nn.Linear and module.out_features in sizes and name not in plan:
            found[name] = "logits"
        elif isinstance(module, nn.ModuleList) and len(module) > 1:
            inner = any(
                other.startswith(f"{name}.0.") and kind == "attention"
                for other, kind in plan.items()
            )
            if (
                inner
                and len({type(each) for each in module}) == 1
                and not any(name.startswith(f"{k}.") for k in found)
            ):
                found[name] = "blocks"
    return found


def _vocabulary(config: Any) -> int | None:
    found = getattr(config, "vocab_size", None)
    return found if isinstance(found, int) else None


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
