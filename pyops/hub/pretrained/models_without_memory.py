"""empty_model: a model of any class of transformers, its parameters on the meta device, its buffers
real.

It is made as from_pretrained makes one, which also computes what lies in no file (rotary
frequencies, position ids) with the model on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from pyops.hub.folder_files import CONFIG, FLOATING, HubError, read_config
from pyops.hub.pretrained.sources import is_of_transformers
from pyops.hub.pretrained.weights import PretrainedWeights, folder_that_is_whole

__all__ = ["empty_like_config", "empty_model"]

GENERATION = "generation_config.json"


def empty_model(folder: Path | str, **config_overrides: Any) -> nn.Module:
    """The model that a folder's config.json describes, without memory for its parameters.

    Tied parameters are one object. Buffers have their values, those of the files where they are
    there. The mode is that of a model that was just made, training.

    Args:
        folder: With a config.json whose "architectures" names a class of transformers, and
            safetensors files.
        **config_overrides: Fields of the config to set otherwise, such as num_labels=3 or
            dtype="bfloat16".

    Returns:
        A PreTrainedModel.

    Raises:
        HubError: transformers is not installed; config.json is missing, damaged, names no class or
            an unknown one, needs code of its own, or describes quantized weights.
        ValueError: The config has no such field.
    """
    folder = folder_that_is_whole(folder)
    values = read_config(folder)
    kind = _class_of(values, folder)
    config = _config_of(kind, folder, config_overrides)
    with PretrainedWeights(folder) as weights:
        if getattr(config, "dtype", None) is None:
            found = sorted({name for name in weights._weights.dtypes.values() if name in FLOATING})
            config.dtype = FLOATING[found[-1]] if found else torch.float32
        model: Any = empty_like_config(kind, config)
        if any(name in model.state_dict() for name, _ in model.named_buffers()):
            weights.check(model, allow_missing=True, allow_unused=True)
            weights.fill_buffers(model)
    if model.can_generate() and (folder / GENERATION).is_file():
        model.generation_config = _transformers().GenerationConfig.from_pretrained(folder)
    made: nn.Module = model
    return made


def empty_like_config(cls: type[nn.Module], config: Any) -> Any:
    """A model of a class of transformers, without memory for its parameters and without a folder.

    Args:
        cls: A class of transformers, such as transformers.LlamaForCausalLM.
        config: Of that class; its dtype is that of the parameters, None: float32.

    Returns:
        A model of the class, in training mode, its buffers real.

    Raises:
        HubError: The class is none of transformers, or can't be made of this config.
    """
    if not isinstance(cls, type) or not hasattr(cls, "_from_config"):
        raise HubError(f"{cls!r} is no model class of transformers; give one such as LlamaModel")
    try:
        with torch.device("meta"), _without_ends():
            model: Any = cls._from_config(config)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise HubError(
            f"{cls.__name__} can't be made as its config says ({type(error).__name__}: {error}); "
            f"correct {CONFIG}"
        ) from None
    _keep_in_fp32(model)
    _compute_buffers(model)
    return model


@contextmanager
def _without_ends() -> Iterator[None]:
    """As of from_pretrained: code that asks torch.linspace for a number gets one."""
    from transformers import initialization

    with ExitStack() as stack:
        if hasattr(initialization, "meta_device_safe_creation_ops"):
            stack.enter_context(initialization.meta_device_safe_creation_ops())
        yield


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise HubError(
            f"transformers can't be imported ({error}), and its classes are what folders are made "
            "of; pip install transformers, or use pyops.hub.load for the models of pyops"
        ) from None
    return transformers


def _class_of(values: Mapping[str, Any], folder: Path) -> Any:
    """The class of transformers that config.json names."""
    transformers, where = _transformers(), folder / CONFIG
    named = values.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise HubError(
            f"{where} has architectures = {named!r}, and no class; write the one that the files "
            'are of there, ["LlamaForCausalLM"] say'
        )
    if values.get("quantization_config") is not None:
        raise HubError(
            f"{where} has quantization_config = {str(values['quantization_config'])[:80]}; pyops "
            "reads weights that are not quantized: choose another checkpoint"
        )
    name = named[0]
    found = getattr(transformers, name, None) if name.isidentifier() else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    if isinstance(code := values.get("auto_map"), dict) and code:
        raise HubError(
            f"{where} wants {name} from code of the folder's own (auto_map: "
            f"{', '.join(sorted(map(str, code.values())))}), which is not run; import and make the "
            "model yourself, and give it to PretrainedWeights(folder).check"
        )
    raise HubError(
        f"{where} names the class {name}, which transformers {transformers.__version__} does not "
        "have; install a version that has it, or correct architectures"
    )


def _config_of(kind: Any, folder: Path, overrides: Mapping[str, Any]) -> Any:
    try:
        config, unknown = kind.config_class.from_pretrained(
            folder, local_files_only=True, return_unused_kwargs=True, **overrides
        )
    except Exception as error:  # its classes check their fields, each with errors of its own
        raise HubError(
            f"{folder / CONFIG} makes no {kind.config_class.__name__} "
            f"({type(error).__name__}: {error}); correct it"
        ) from None
    if unknown := set(unknown) & set(overrides):
        raise ValueError(
            f"{kind.config_class.__name__} has no {sorted(unknown)}; it has "
            f"{', '.join(sorted(config.to_dict()))}"
        )
    return config


def _keep_in_fp32(model: Any) -> None:
    """The parameters of a 16-bit model that its class keeps in float32, as from_pretrained does."""
    dtype = model.config.dtype
    if not hasattr(model, "_get_dtype_plan") or not isinstance(dtype, torch.dtype):
        return
    plan = model._get_dtype_plan(dtype)
    for path, module in model.named_modules():
        for key, parameter in list(module._parameters.items()):
            name = f"{path}.{key}"
            for pattern, wanted in plan.items():
                found = parameter is not None and _has_part(name, pattern)
                if found and parameter.dtype == dtype != wanted:
                    module._parameters[key] = nn.Parameter(
                        torch.empty_like(parameter, dtype=wanted),
                        requires_grad=parameter.requires_grad,
                    )
                    break


def _has_part(name: str, pattern: str) -> bool:
    return re.search(rf"(^|\.){pattern}($|\.)", name) is not None


@torch.no_grad()
def _compute_buffers(model: Any) -> None:
    """Memory and values for all buffers."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.zeros_like(buffer, device="cpu")
    tensors = list(model.parameters())
    for tensor in tensors:  # marks them as not to be drawn: on the meta device they can't be
        tensor._is_hf_initialized = True
    model.initialize_weights()
    for tensor in tensors:
        del tensor._is_hf_initialized
    if not is_of_transformers(model):
        raise HubError(f"{type(model).__name__} is no model of transformers")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise HubError(f"{name} of {type(model).__name__} has no values without the parameters")
