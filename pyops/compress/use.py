"""Use of a folder whose weights are packed or quantized, by `pyops generate` and `pyops eval`.

options = use_of(folder, tp=2, pp=1, precision="fp32", device="auto")     of any kind of folder
continued(folder, "To be, or", options)                                   pyops.train.pretrained
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.agreement import gather_numbers, ranks_agree
from pyops.compress.folders import form_of, load_model
from pyops.config import ConfigError
from pyops.hub.folder_files import HubError
from pyops.mesh import Mesh
from pyops.models import generate
from pyops.parallel import ParallelPlan
from pyops.precision import PRECISIONS
from pyops.tensor_parallel import Ranks
from pyops.train.pretrained.folder_model import FolderModel
from pyops.train.pretrained.folder_use import UseOptions

__all__ = ["CompressedModel", "CompressedUse", "use_of"]


def use_of(folder: str, *, tp: int, pp: int, precision: str, device: str) -> UseOptions:
    """How the ranks share a folder's model out, whatever form its weights are in.

    Args:
        folder: Of a causal language model.
        tp, pp, precision, device: As of `UseOptions`.

    Raises:
        HubError: Its compressed.json is damaged.
    """
    kind = UseOptions if form_of(folder) == "dense" else CompressedUse
    return kind(tp, pp, precision, device)


class CompressedModel:
    """A model that is packed or quantized, with what `pyops generate` and `pyops eval` ask of a
    Trainer.

    Args:
        model: GPT.
        mesh: The ranks.

    Attributes:
        mesh: The ranks.
    """

    def __init__(self, model: Any, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Mapping[str, Tensor]]) -> float:
        """The mean loss over all tokens that count, of all copies. A collective.

        Args:
            batches: "input_ids" and "labels" [B, T] of this copy, which may have no rows.
        """
        nats, count = 0.0, 0
        device = next(self.model.parameters()).device
        for batch in batches:
            tokens, targets = batch["input_ids"][:, :-1], batch["labels"][:, 1:]
            if len(tokens):
                nats += float(self.model.loss(tokens, targets, reduction="sum"))
                count += int((targets != -100).sum())
        found = gather_numbers([nats, count], device=device, group=self.mesh.group("dp"))
        return float(sum(each[0] for each in found) / sum(each[1] for each in found))

    def generate(
        self, prompt: Tensor, *, max_new_tokens: int = 20, eos_token_id: Any = None, **options: Any
    ) -> Tensor:
        """The tokens of one row and what follows them, [1, T + n]. A collective.

        Args:
            prompt: int64 [1, T].
            max_new_tokens: How many follow at most.
            eos_token_id: What ends the text; None: nothing.
            options: temperature, top_k, top_p, seed.
        """
        given = {"temperature": 0.0, **options}
        rows = generate(self.model, [prompt[0]], max_new=max_new_tokens, end=eos_token_id, **given)
        (row,) = rows
        return torch.tensor([[*row.prompt, *row.tokens]])


@dataclass(frozen=True)
class CompressedUse(UseOptions):
    """How the ranks share a folder's model out whose weights are packed or quantized."""

    def trainer(self, model: FolderModel, device: torch.device) -> Any:
        """The model, shared out. A collective.

        Args:
            model: Of the folder.
            device: Of this rank.

        Raises:
            ConfigError: On every rank alike, for a layout that does not fit.
        """
        plan = ParallelPlan(tp=self.tp, precision=self.precision)
        with ranks_agree():
            if self.pp > 1:
                raise ConfigError(
                    f"pp is {self.pp}, but {model.folder} has weights in the form "
                    f"{form_of(model.folder)!r}, which are not cut into stages; use tp"
                )
            try:
                axes = plan.axes(dist.get_world_size() if dist.is_initialized() else 1)
            except ValueError as error:
                raise ConfigError(str(error)) from None
        mesh = Mesh(axes, device_type=device.type)
        dtype = None if self.precision == "fp32" else PRECISIONS[self.precision].dtype
        try:
            found = load_model(model.folder, ranks=Ranks.of(mesh), device=device, dtype=dtype)
        except HubError:
            raise
        except ValueError as error:
            raise ConfigError(f"{model.folder}: {error}") from None
        return CompressedModel(found, mesh)
