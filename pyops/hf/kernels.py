"""Kernels of pyops in a model of transformers, in place, and out of it again.

    apply_kernels(model)     a forward over fused ops, as an attribute of each module it fits
    remove_kernels(model)    that attribute is deleted: the class's own forward is back

Neither classes nor modules of Python are changed, so other models of the process compute as before,
and a model's parameters, submodules and state_dict stay what they are. Liger (Hsu et al.,
arXiv:2410.10989) replaces the same parts.

Rotary positions are left alone, although pyops has a kernel for them: attention calls a function of
its Python module, and to replace that would change every model of the architecture.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from pyops.hf import fused_forwards as fused
from pyops.ops.library import build_info, has_kernel
from pyops.protocols import HasPlacements

__all__ = ["WORTH_IT", "apply_kernels", "remove_kernels"]

LOSS = "linear_cross_entropy"
OPS = {  # what is swapped -> an op that it calls
    "rms_norm": "rms_norm",
    "layer_norm": "layer_norm",
    "gated_mlp": "bias_gated",
    "merged_gated_mlp": "bias_gated",
    "gelu": "bias_activation",
    "gelu_tanh": "bias_activation",
    "silu": "bias_activation",
    LOSS: "cross_entropy_statistics_",
}

WORTH_IT: Mapping[str, Mapping[str, tuple[bool, str]]] = {
    "cpu": {
        "rms_norm": (True, "one pass instead of one for each operation of the formula"),
        "layer_norm": (True, "somewhat faster than torch's own"),
        "gated_mlp": (False, "gate and up are first put side by side, which takes longer"),
        "merged_gated_mlp": (True, "hardly a difference: matrix products take the time"),
        "gelu": (True, "faster than torch's own"),
        "gelu_tanh": (True, "faster than torch's own, and than the formula in Python"),
        "silu": (False, "torch's own is one pass too, and faster in fp32"),
        LOSS: (True, "no whole logits"),
    },
    "cuda": {kind: (True, "not measured: fewer passes over memory, as on the CPU") for kind in OPS},
}
"""By device, what `apply_kernels` swaps there unless told otherwise, and why: `benchmarks
apply_kernels` measures it."""

# Classes of transformers, as folder.Class, by the forward that stands for theirs. Only forwards
# with the very statements of the first of a row are listed, which a test compares.
NORMS: dict[Callable[..., Any], str] = {
    fused.promoted_rms_norm: "llama.LlamaRMSNorm mistral.MistralRMSNorm mixtral.MixtralRMSNorm "
    "ministral.MinistralRMSNorm ministral3.Ministral3RMSNorm qwen2.Qwen2RMSNorm "
    "qwen2_moe.Qwen2MoeRMSNorm qwen2_vl.Qwen2VLRMSNorm qwen2_5_vl.Qwen2_5_VLRMSNorm "
    "qwen3.Qwen3RMSNorm qwen3_moe.Qwen3MoeRMSNorm qwen3_vl.Qwen3VLTextRMSNorm phi3.Phi3RMSNorm "
    "granite.GraniteRMSNorm granitemoe.GraniteMoeRMSNorm smollm3.SmolLM3RMSNorm "
    "deepseek_v2.DeepseekV2RMSNorm deepseek_v3.DeepseekV3RMSNorm glm.GlmRMSNorm "
    "glm4.Glm4RMSNorm olmoe.OlmoeRMSNorm mllama.MllamaTextRMSNorm ernie4_5.Ernie4_5RMSNorm "
    "exaone4.Exaone4RMSNorm",
    fused.rounded_rms_norm: "olmo2.Olmo2RMSNorm olmo3.Olmo3RMSNorm gpt_oss.GptOssRMSNorm",
    fused.offset_rms_norm: "gemma.GemmaRMSNorm gemma2.Gemma2RMSNorm gemma3.Gemma3RMSNorm "
    "t5gemma.T5GemmaRMSNorm qwen3_next.Qwen3NextRMSNorm",
    fused.rms_norm_in_weight_dtype: "t5.T5LayerNorm mt5.MT5LayerNorm umt5.UMT5LayerNorm "
    "longt5.LongT5LayerNorm switch_transformers.SwitchTransformersLayerNorm",
}
MLPS: dict[Callable[..., Any], str] = {
    fused.gated_mlp: "llama.LlamaMLP mistral.MistralMLP ministral.MinistralMLP "
    "ministral3.Ministral3MLP qwen2.Qwen2MLP qwen2_moe.Qwen2MoeMLP qwen3.Qwen3MLP "
    "qwen3_moe.Qwen3MoeMLP qwen3_vl.Qwen3VLTextMLP gemma.GemmaMLP gemma2.Gemma2MLP "
    "gemma3.Gemma3MLP olmo.OlmoMLP olmo2.Olmo2MLP olmo3.Olmo3MLP cohere.CohereMLP "
    "granite.GraniteMLP smollm3.SmolLM3MLP deepseek_v3.DeepseekV3MLP stablelm.StableLmMLP "
    "mllama.MllamaTextMLP ernie4_5.Ernie4_5MLP exaone4.Exaone4MLP",
    fused.merged_gated_mlp: "phi3.Phi3MLP glm.GlmMLP glm4.Glm4MLP glm4v.Glm4vTextMLP",
    fused.t5_gated_mlp: "t5.T5DenseGatedActDense mt5.MT5DenseGatedActDense "
    "umt5.UMT5DenseGatedActDense",
}
ACT_NAMES = {
    fused.gated_mlp: "act_fn",
    fused.merged_gated_mlp: "activation_fn",
    fused.t5_gated_mlp: "act",
}
CAUSAL = (
    "llama.LlamaForCausalLM mistral.MistralForCausalLM ministral.MinistralForCausalLM "
    "ministral3.Ministral3ForCausalLM qwen2.Qwen2ForCausalLM qwen3.Qwen3ForCausalLM "
    "phi.PhiForCausalLM phi3.Phi3ForCausalLM gemma.GemmaForCausalLM olmo.OlmoForCausalLM "
    "olmo2.Olmo2ForCausalLM olmo3.Olmo3ForCausalLM glm.GlmForCausalLM glm4.Glm4ForCausalLM "
    "smollm3.SmolLM3ForCausalLM starcoder2.Starcoder2ForCausalLM helium.HeliumForCausalLM "
    "ernie4_5.Ernie4_5ForCausalLM exaone4.Exaone4ForCausalLM"
)
GPT2 = "gpt2.GPT2LMHeadModel"
ACTIVATIONS = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "SiLUActivation": "silu",
}
FORWARDS = (*NORMS, *MLPS, fused.layer_norm_of_torch, fused.activation_alone, fused.causal_lm)


def _by_class(table: Mapping[Any, str]) -> dict[tuple[str, str], Any]:
    """(Python module, class) -> the key of its row."""
    return {
        (f"transformers.models.{folder}.modeling_{folder}", name): key
        for key, names in table.items()
        for folder, _, name in (each.partition(".") for each in names.split())
    }


NORM_OF, MLP_OF = _by_class(NORMS), _by_class(MLPS)
OUTPUT_OF = _by_class(
    {
        "CausalLMOutputWithPast": CAUSAL,
        "CausalLMOutputWithCrossAttentions": GPT2,
    }
)


@dataclass(frozen=True)
class _Swap:
    """What can stand for a module's forward."""

    kind: str
    forward: Callable[..., Any]
    unused: tuple[nn.Module, ...] = ()
    """Submodules that it does not call, although the class's own forward does."""


def apply_kernels(
    model: nn.Module,
    *,
    kinds: Collection[str] | None = None,
    fused_loss: bool = False,
    device: str | None = None,
) -> dict[str, str]:
    """Give the norms, MLPs and activations of a model of transformers forwards over fused ops, in
    place.

    Values and gradients are those of before within rounding, in training and in evaluation. The
    fused ops have no second derivative, no forward-mode derivative and no rule for torch.func.vmap.
    Modules with hooks, or with a forward of their own, and classes that are not known stay as they
    are. Adapters of PEFT may be added before or after. Apply before fully_shard, and before
    torch.compile; not under torch.nn.DataParallel, whose replicas would compute with the first
    one's parameters. Kernels of an earlier call are removed first.

    Args:
        model: Or a module that has it inside, such as a PeftModel. On any device, meta too.
        kinds: What to swap, of "rms_norm", "layer_norm", "gated_mlp", "merged_gated_mlp", "gelu",
            "gelu_tanh" and "silu". None: what `WORTH_IT` says is faster on the device.
        fused_loss: In training, compute the loss of a causal language model by
            `linear_cross_entropy`, so that whole logits never exist. The result then has
            logits=None where labels are given, unless the call says logits_to_keep= or
            skip_logits=False. skip_logits=True does the same in evaluation.
        device: "cpu" or "cuda", where the model will run; None: where its parameters are, and the
            CPU for one on meta.

    Returns:
        {name of the module: the kind that it was given, or "left: " and why}, of all modules whose
        class is known. The model itself has the name "".

    Raises:
        TypeError: The model is no module.
        ValueError: There is no such kind, or the model's parameters are parts of larger ones.
    """
    _check(model, kinds)
    remove_kernels(model)
    place = _device_of(model) if device is None else device.split(":")[0]
    report: dict[str, str] = {}
    skipped: set[nn.Module] = set()
    # A model's MLP comes before the activation within it.
    for name, module in model.named_modules():
        swap = None if module in skipped else _swap_for(module, fused_loss)
        if swap is None:
            continue
        reason = _reason_to_leave(module, swap, kinds, place)
        report[name] = swap.kind if reason is None else f"left: {reason}"
        if reason is None:
            skipped.update(swap.unused)
            # An object that can be copied and pickled with its module.
            module.forward = swap.forward  # type: ignore[method-assign]
    return report


def remove_kernels(model: nn.Module) -> list[str]:
    """Undo `apply_kernels`: each module computes by the forward of its class again, bit for bit.

    Args:
        model: That `apply_kernels` was given, or one that has it inside.

    Returns:
        The names of the modules that had kernels. A forward that another library has wrapped since
        is not among them.
    """
    names = []
    for name, module in model.named_modules():
        given = vars(module).get("forward")
        if isinstance(given, partial) and given.func in FORWARDS:
            del module.forward
            names.append(name)
    return names


def _check(model: Any, kinds: Collection[str] | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    known = [kind for kind in OPS if kind != LOSS]
    if isinstance(kinds, str) or (wrong := sorted(set(kinds or ()) - set(known))):
        raise ValueError(
            f"kinds is {kinds!r}; give a collection of {', '.join(known)}"
            if isinstance(kinds, str)
            else f"kinds has {', '.join(map(repr, wrong))}; there are {', '.join(known)}"
        )
    for name, module in model.named_modules():
        parts = [key for key, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)]
        if parts or isinstance(module, HasPlacements):
            what = f"parameter {parts[0]!r} of" if parts else "module"
            raise ValueError(
                f"{what} {name!r} is a part of a larger one, cut over ranks; call apply_kernels "
                "before the model is cut, where the cut allows it: the layers of "
                "pyops.tensor_parallel have the kernels already"
            )


def _device_of(model: nn.Module) -> str:
    found = next((p.device.type for p in model.parameters()), "cpu")
    return "cpu" if found == "meta" else found


def _reason_to_leave(
    module: nn.Module, swap: _Swap, kinds: Collection[str] | None, device: str
) -> str | None:
    """Why the module keeps its forward, or None."""
    if fused.has_hooks(module):
        return "it has hooks, or a forward of its own"
    if any(fused.has_hooks(part) for part in swap.unused):
        return "a module within it, which would not be called, has hooks"
    if type(module).forward.__module__ != type(module).__module__:
        return "the forward of its class has been replaced"
    if swap.kind == LOSS and not fused.usual_head(module):
        return "its head or its loss is not the usual one"
    asked = kinds is not None or swap.kind == LOSS
    if kinds is not None and swap.kind not in (*kinds, LOSS):
        return "not among kinds"
    # Plain torch answers for the ops where there is no extension, for those who ask for it.
    if not has_kernel(OPS[swap.kind], device) and (build_info()["extension"] or not asked):
        return f"no kernel for {device} in this installation"
    worth, why = WORTH_IT[device][swap.kind] if device in WORTH_IT else (True, "")
    return None if asked or worth else f"not worth it on {device}: {why}"


def _swap_for(module: Any, fused_loss: bool) -> _Swap | None:
    """What pyops has for a module of this class; None for one that is not known."""
    cls = type(module)
    key = (cls.__module__, cls.__qualname__)
    if (norm := NORM_OF.get(key)) is not None:
        return _Swap("rms_norm", partial(norm, module))
    if cls is nn.LayerNorm:
        fits = module.weight is not None and len(module.normalized_shape) == 1
        return _Swap("layer_norm", partial(fused.layer_norm_of_torch, module)) if fits else None
    if (mlp := MLP_OF.get(key)) is not None:
        act = getattr(module, ACT_NAMES[mlp])
        if (activation := _activation_of(act)) is None:
            return None
        kind = "merged_gated_mlp" if mlp is fused.merged_gated_mlp else "gated_mlp"
        return _Swap(kind, partial(mlp, module, activation=activation), (act,))
    if (alone := _activation_of(module)) is not None:
        return _Swap(alone, partial(fused.activation_alone, module, activation=alone))
    if fused_loss and (found := OUTPUT_OF.get(key)) is not None:
        return _Swap(LOSS, _causal_forward(module, found))
    return None


def _activation_of(module: nn.Module) -> str | None:
    """The name by which the ops know an activation of torch's or transformers'."""
    cls = type(module)
    if cls is nn.SiLU:
        return "silu"
    if cls is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    if cls.__module__ != "transformers.activations":
        return None
    return ACTIVATIONS.get(cls.__qualname__)


def _causal_forward(model: Any, output: str) -> Callable[..., Any]:
    """`causal_lm` with the signature of the forward it stands for, which the Trainer, generate()
    and PEFT look at."""
    given = list(inspect.signature(type(model).forward).parameters.values())[1:]
    # Without annotations, which would have to be pickled.
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in given]
    cls = getattr(importlib.import_module("transformers.modeling_outputs"), output)
    forward = partial(
        fused.causal_lm,
        model,
        names=tuple(each.name for each in _positional(given)),
        output=cls,
        # Keys and values among them, whose field is named otherwise from transformers 5.24 on.
        fields=tuple(f.name for f in fields(cls) if f.name not in ("loss", "logits")),
    )
    forward.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]
    return forward


def _positional(parameters: list[inspect.Parameter]) -> Iterator[inspect.Parameter]:
    return (each for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
