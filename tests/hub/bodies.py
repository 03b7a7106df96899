"""What ranks do in the tests of this folder. transformers is not imported here: workers would take
seconds for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops import hub

__all__ = ["load_and_run", "outputs_of"]


def load_and_run(
    rank: int,
    group: Any,
    folder: str,
    given: dict[str, Tensor],
    sequence_parallel: bool,
    to: str | None,
) -> tuple[list[Tensor], int]:
    """The outputs of the folder's model, and how many parameters this rank holds; writes it again
    where `to` says."""
    model = hub.load(folder, group=group, sequence_parallel=sequence_parallel)
    found = outputs_of(model, given)
    if to is not None:
        hub.save(model, to, group=group)
    return found, sum(p.numel() for p in model.parameters())


def outputs_of(model: torch.nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    """Outputs of a model of pyops on the same inputs."""
    mask = given["attention_mask"].bool() if "attention_mask" in given else None
    with torch.no_grad():
        if "pixel_values" in given:
            return [model(given["pixel_values"])]
        if "decoder_input_ids" in given:
            return [model(given["input_ids"], given["decoder_input_ids"], mask=mask)]
        if "token_type_ids" in given:
            found = model(given["input_ids"], types=given["token_type_ids"], mask=mask)
            return list(found) if isinstance(found, tuple) else [found]
        return [model(given["input_ids"])]
