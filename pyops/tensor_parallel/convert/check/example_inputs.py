"""A few tokens, pixels or sounds that a model of transformers takes, made up from its
configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Inputs", "examples"]

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
TOKENS = 7  # which no even number of ranks divides


def examples(model: nn.Module, given: Any) -> Iterator[Inputs]:
    """Arguments to try, the best first: those given (a tensor, a tuple, or a mapping of names), or
    some of its configuration's.

    Raises:
        ValueError: Where none can be made up, or what is given is of another sort.
    """
    if given is not None:
        yield _given(given)
        return
    config = getattr(model, "config", None)
    names = inspect.signature(model.forward).parameters
    if config is None or not any(name in names for name in _MAKERS):
        raise ValueError(
            f"the plan is checked by running {type(model).__name__} before it is cut, "
            "and no inputs can be made up for it: "
            "pass example_inputs= (a tensor, a tuple of arguments, or a mapping of names "
            "to them; a few tokens do), or "
            "check=False"
        )
    for batch in (2, 1):
        arguments: dict[str, Any] = {}
        for name, make in _MAKERS.items():
            if name in names and (found := make(config, batch)) is not None:
                arguments[name] = found
        if "use_cache" in names:
            arguments["use_cache"] = False
        yield (), arguments
    if (
        "input_ids" in arguments
    ):  # a head that chooses between texts takes several of them for each row
        yield (), {**arguments, "input_ids": arguments["input_ids"].expand(2, 2, TOKENS)}


def _given(given: Any) -> Inputs:
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, tuple | list):
        return tuple(given), {}
    raise ValueError(
        f"example_inputs is {type(given).__name__}; pass a tensor, a tuple of arguments "
        "or a mapping of names to them"
    )


def _part(config: Any, *names: str) -> Any:
    """The configuration of the text, or of the pictures, that is within this one; else this one."""
    for name in names:
        found = getattr(config, name, None)
        if found is not None and not isinstance(found, dict):
            return found
    return config


def _size(config: Any, *names: str) -> int | None:
    for name in names:
        found = getattr(config, name, None)
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
    return None


def _ids(seed: int, *parts: str) -> Any:
    def make(config: Any, batch: int) -> Tensor | None:
        text = _part(config, *parts)
        size = _size(text, "vocab_size", "decoder_vocab_size")
        if size is None:
            return None
        special = {
            v
            for k, v in vars(text).items()
            if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)
        }
        plain = [token for token in range(min(size, 1000)) if token not in special] or [0]
        generator = torch.Generator().manual_seed(seed)
        ids = torch.tensor(plain)[
            torch.randint(0, len(plain), (batch, TOKENS), generator=generator)
        ]
        end = getattr(text, "eos_token_id", None)
        if isinstance(end, int) and 0 <= end < size:
            ids[:, -1] = end  # which some heads look for
        return ids

    return make


def _pixels(config: Any, batch: int) -> Tensor | None:
    vision = _part(config, "vision_config", "encoder", "backbone_config")
    size = getattr(vision, "image_size", None)
    if size is None:
        return None
    height, width = size if isinstance(size, tuple | list) else (size, size)
    frames = _size(vision, "num_frames")
    channels = _size(vision, "num_channels", "in_channels", "in_chans") or 3
    shape = (batch, *((frames,) if frames else ()), channels, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def _sounds(config: Any, batch: int) -> Tensor | None:
    audio = _part(config, "audio_config", "encoder")
    mels, positions = _size(audio, "num_mel_bins"), _size(audio, "max_source_positions")
    if mels is not None and positions is not None and not hasattr(audio, "input_feat_per_channel"):
        shape: tuple[int, ...] = (batch, mels, 2 * positions)
    else:
        width = _size(
            audio,
            "input_feat_per_channel",
            "feature_projection_input_dim",
            "input_channels",
            "num_mel_bins",
        )
        shape = (batch, 32, width or 80)
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


def _waves(config: Any, batch: int) -> Tensor | None:
    mels, length = _size(config, "num_mel_bins"), _size(config, "max_length")
    shape = (batch, length, mels) if mels and length else (batch, 1600)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


_MAKERS: dict[str, Any] = {
    "input_ids": _ids(1, "text_config", "encoder"),
    "pixel_values": _pixels,
    "input_features": _sounds,
    "input_values": _waves,
    "decoder_input_ids": _ids(2, "text_config", "decoder"),
}
