"""The pattern of attention in config.json, under keys of our own: transformers keeps them, and
computes attention without a pattern until `pyops.attention.apply` sets one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyops.hub.config_fields import ConfigFields
from pyops.hub.folder_files import HubError

__all__ = ["PATTERN_KEYS", "pattern_fields", "with_pattern"]

PATTERN_KEYS = ("pyops_pattern", "pyops_pattern_block")
BLOCK = 64  # where config.json does not say


def pattern_fields(config: Any) -> dict[str, Any]:
    """What config.json says of the pattern of a configuration of ours; nothing without one."""
    found = (getattr(config, "pattern", ""), getattr(config, "pattern_block", BLOCK))
    return {} if found == ("", BLOCK) else dict(zip(PATTERN_KEYS, found, strict=True))


def with_pattern(config: Any, fields: ConfigFields) -> Any:
    """The configuration with the pattern that config.json names, if any.

    Raises:
        HubError: For a pattern that is none, or of an architecture that takes none.
        ValueError: For one that the configuration refuses.
    """
    text_key, block_key = PATTERN_KEYS
    text = fields.raw(text_key)
    if text is None:
        return config
    if not isinstance(text, str) or not hasattr(config, "pattern"):
        raise HubError(
            f"config.json has {text_key} = {str(text)[:80]!r}; it must be a text of a pattern, of "
            "a GPT or a BERT: take it out"
        )
    block = fields.integer(block_key, BLOCK, most=1 << 20)
    return replace(config, pattern=text, pattern_block=block)
