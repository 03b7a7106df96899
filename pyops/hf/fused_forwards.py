"""Forwards of transformers' norms, MLPs, activations and causal language models over the kernels of
pyops: what `pyops.hf.apply_kernels` puts on a module.

    type(module).forward(module, x)        several passes of plain torch
    one of these(module, x)                the same parameters, the same submodules, fused ops

Each takes the module first and otherwise the arguments of the forward that it stands for, and calls
that one for what the kernels do not take: other dtypes, hooks that were added since.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.mesh import ALONE
from pyops.ops.layers.activation import FLOATS, bias_activation, bias_gated
from pyops.ops.layers.norm import layer_norm, rms_norm
from pyops.tensor_parallel import LinearCrossEntropyConfig, linear_cross_entropy

__all__ = [
    "activation_alone",
    "causal_lm",
    "gated_mlp",
    "has_hooks",
    "layer_norm_of_torch",
    "merged_gated_mlp",
    "offset_rms_norm",
    "promoted_rms_norm",
    "rms_norm_in_weight_dtype",
    "rounded_rms_norm",
    "t5_gated_mlp",
]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether something runs around the module's forward, or in its place."""
    return "forward" in vars(module) or any(len(getattr(module, hooks)) for hooks in HOOKS)


# --- norms


def _takes(x: Tensor, weight: Tensor) -> bool:
    return x.dtype in FLOATS and (x.dtype == torch.float64) == (weight.dtype == torch.float64)


def promoted_rms_norm(module: Any, hidden_states: Tensor) -> Tensor:
    """weight * norm(x).to(x.dtype): of the dtype to which torch promotes the two."""
    if not _takes(hidden_states, module.weight):
        return _plain(module, hidden_states)
    dtype = torch.promote_types(hidden_states.dtype, module.weight.dtype)
    return rms_norm(hidden_states.to(dtype), module.weight, eps=module.variance_epsilon)


def rounded_rms_norm(module: Any, hidden_states: Tensor) -> Tensor:
    """(weight * norm(x)).to(x.dtype)."""
    if not _takes(hidden_states, module.weight):
        return _plain(module, hidden_states)
    return rms_norm(hidden_states, module.weight, eps=module.variance_epsilon)


def offset_rms_norm(module: Any, x: Tensor) -> Tensor:
    """Gemma's: (norm(x) * (1 + weight)).to(x.dtype)."""
    if not _takes(x, module.weight):
        return _plain(module, x)
    return rms_norm(x, module.weight, eps=module.eps, offset=1.0)


def rms_norm_in_weight_dtype(module: Any, hidden_states: Tensor) -> Tensor:
    """T5's, whose result has the weight's dtype."""
    weight = module.weight
    if not _takes(hidden_states, weight):
        return _plain(module, hidden_states)
    wide = hidden_states if hidden_states.dtype == weight.dtype else hidden_states.float()
    return rms_norm(wide, weight, eps=module.variance_epsilon).to(weight.dtype)


def layer_norm_of_torch(module: nn.LayerNorm, input: Tensor) -> Tensor:
    """torch.nn.LayerNorm of one dtype. Under autocast torch may return fp32 for 16-bit numbers,
    which the kernel does not: those are torch's own."""
    narrow = input.dtype in (torch.bfloat16, torch.float16)
    if (
        input.dtype != module.weight.dtype
        or input.dtype not in FLOATS
        or (narrow and torch.is_autocast_enabled(input.device.type))
    ):
        return _plain(module, input)
    return layer_norm(input, module.weight, module.bias, eps=module.eps)


def _plain(module: Any, x: Tensor) -> Tensor:
    result: Tensor = type(module).forward(module, x)
    return result


# --- activations and gated MLPs


def activation_alone(module: Any, input: Tensor, *, activation: str) -> Tensor:
    """An activation's module, in one pass."""
    if input.dtype not in FLOATS or input.dim() == 0:
        return _plain(module, input)
    return bias_activation(input, activation=activation)


def _gated(gate: Tensor, up: Tensor, act: nn.Module, activation: str) -> Tensor:
    if gate.dtype != up.dtype or gate.dtype not in FLOATS or gate.shape != up.shape:
        product: Tensor = act(gate) * up
        return product
    return bias_gated(torch.cat([gate, up], dim=-1), activation=activation)


def gated_mlp(module: Any, x: Tensor, *, activation: str) -> Tensor:
    """down(act(gate(x)) * up(x)). The three are called as modules, whatever stands there: an
    adapter of PEFT, say."""
    if has_hooks(module.act_fn):
        return _plain(module, x)
    h = _gated(module.gate_proj(x), module.up_proj(x), module.act_fn, activation)
    result: Tensor = module.down_proj(h)
    return result


def merged_gated_mlp(module: Any, hidden_states: Tensor, *, activation: str) -> Tensor:
    """As `gated_mlp`, where one linear layer gives gate and up side by side: nothing is copied."""
    if has_hooks(module.activation_fn):
        return _plain(module, hidden_states)
    merged = module.gate_up_proj(hidden_states)
    if merged.dtype in FLOATS:
        h = bias_gated(merged, activation=activation)
    else:
        gate, up = merged.chunk(2, dim=-1)
        h = up * module.activation_fn(gate)
    result: Tensor = module.down_proj(h)
    return result


def t5_gated_mlp(module: Any, hidden_states: Tensor, *, activation: str) -> Tensor:
    """T5's, which drops out between the two layers and may keep the second one in fp32."""
    if has_hooks(module.act):
        return _plain(module, hidden_states)
    gate, up = module.wi_0(hidden_states), module.wi_1(hidden_states)
    h = module.dropout(_gated(gate, up, module.act, activation))
    weight = module.wo.weight
    if isinstance(weight, Tensor) and weight.dtype not in (h.dtype, torch.int8):
        h = h.to(weight.dtype)
    result: Tensor = module.wo(h)
    return result


# --- the loss of a causal language model


def causal_lm(
    model: Any,
    *args: Any,
    names: tuple[str, ...],
    output: Any,
    fields: tuple[str, ...],
    skip_logits: bool | None = None,
    **kwargs: Any,
) -> Any:
    """The forward of a causal language model; with labels, its loss without logits.

    Args:
        model: The language model.
        args: Positional arguments of the forward that it stands for.
        names: Their names.
        output: The class of the result.
        fields: What the result takes from that of the model without its head.
        skip_logits: Whether to compute the loss without logits; None: in training alone.
        kwargs: Other arguments of the forward.
    """
    kwargs.update(zip(names, args, strict=False))
    skip = model.training if skip_logits is None else skip_logits
    keep = kwargs.get("logits_to_keep", 0)
    whole = isinstance(keep, int) and keep == 0
    if not (skip and whole and kwargs.get("labels") is not None and usual_head(model)):
        return type(model).forward(model, **kwargs)
    labels = kwargs.pop("labels")
    kwargs.pop("logits_to_keep", None)
    return_dict = kwargs.pop("return_dict", None)
    found = getattr(model, model.base_model_prefix)(**kwargs)
    loss = _causal_loss(found.last_hidden_state, model.lm_head, labels, **kwargs)
    result = output(loss=loss, **{field: getattr(found, field) for field in fields})
    as_dict = model.config.return_dict if return_dict is None else return_dict
    return result if as_dict else result.to_tuple()


def usual_head(model: Any) -> bool:
    """Whether the loss is transformers' own, of a linear layer that nobody has changed."""
    head = model.lm_head
    return (
        type(head) is nn.Linear
        and not has_hooks(head)
        and head.out_features == model.config.vocab_size
        and not hasattr(model, "_loss_function")
        and getattr(model, "loss_type", None) in (None, "ForCausalLM")
    )


def _causal_loss(
    hidden: Tensor,
    head: nn.Linear,
    labels: Tensor,
    *,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """As transformers' ForCausalLMLoss: each token's label is the next one."""
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = linear_cross_entropy(
        hidden,
        head.weight,
        shift_labels.to(hidden.device).reshape(hidden.shape[:-1]),
        bias=head.bias,
        group=ALONE,
        reduction="mean" if num_items_in_batch is None else "sum",
        config=LinearCrossEntropyConfig(ignore_index=ignore_index),
    )
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    divided: Tensor = loss / num_items_in_batch
    return divided
