"""Models that a folder's becomes before it is trained, whole on every rank: with adapters in its
layers, or with some of its layers alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pyops.config import AdapterConfig, Config, ConfigError
from pyops.distill import student_from_layers

__all__ = ["changed_model"]


def changed_model(config: Config) -> Callable[[], Any] | None:
    """Makes the module that the run trains; None where it is the folder's own.

    Args:
        config: Of a run over a folder.
    """
    folder = config.model_folder.folder
    if config.adapter.rank:
        return partial(_adapted, folder, config.adapter, seed=config.train.seed)
    if config.distill.keep:
        return partial(_with_some_layers, folder, config.distill.keep)
    return None


def _with_some_layers(folder: str, keep: tuple[int, ...]) -> Any:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    try:
        return student_from_layers(base, keep)
    except ValueError as error:
        raise ConfigError(f"distill.keep: {error}") from None


def _adapted(folder: str, adapter: AdapterConfig, *, seed: int) -> Any:
    """The folder's model with PEFT's LoRA in its layers, drawn alike on every rank."""
    try:
        import peft
    except ImportError:
        raise ConfigError(
            f"adapter.rank is {adapter.rank}, but peft is not installed: pip install peft"
        ) from None
    from transformers import AutoModelForCausalLM

    options = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=list(adapter.layers) or "all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        options.fan_in_fan_out = _is_conv1d(base)
        return peft.get_peft_model(base, options)


def _is_conv1d(model: torch.nn.Module) -> bool:
    """Whether linear layers are transformers' Conv1D, whose weights are [in, out]."""
    return any(type(module).__name__ == "Conv1D" for module in model.modules())
