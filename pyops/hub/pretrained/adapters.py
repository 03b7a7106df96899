"""Adapters of PEFT around a model that is shared out: which model is within, and the folder that
peft.PeftModel.from_pretrained reads.

    PeftModelForCausalLM                        the wrapper: kept, without memory, to write folders
      base_model.model   LlamaForCausalLM       what is trained: its layers have the adapters
        ...q_proj        lora.Linear
          base_layer, lora_A.default, lora_B.default
"""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyops.checkpoint.writing import replace_folder
from pyops.comm.agreement import gather, ranks_agree
from pyops.hub.folder_files import HubError
from pyops.hub.pretrained.layouts import gathered
from pyops.hub.pretrained.saving import Position
from pyops.mesh import ALONE, Mesh

__all__ = ["Adapters"]

CONFIG = "adapter_config.json"
FILES = (CONFIG, "adapter_model.safetensors", "README.md")


class Adapters:
    """Made by `Adapters.of`.

    Attributes:
        inner: The model of transformers within, whose layers have the adapters.
    """

    def __init__(self, wrapper: Any) -> None:
        self.inner: nn.Module = wrapper.get_base_model()
        # What save_pretrained of PEFT looks at beside the values.
        memo: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in wrapper.parameters()
        }
        self._empty = copy.deepcopy(wrapper, memo)
        names = {id(module): name for name, module in wrapper.named_modules()}
        self._prefix = names[id(self.inner)] + "."
        self._saved = [
            f"{name}.{part}."
            for name, module in self.inner.named_modules()
            for part in getattr(module, "adapter_layer_names", ())
        ]

    @classmethod
    def of(cls, model: nn.Module) -> Adapters | None:
        """None for a model that PEFT has not wrapped.

        Args:
            model: Whole, before anything is cut.

        Raises:
            ValueError: Adapters without PEFT's wrapper, or that train tokens in place of layers.
        """
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError(
                f"the {type(model).__name__} has adapters by its own add_adapter, without the "
                "wrapper that writes them; give peft.get_peft_model(model, config)"
            )
        kinds = [kind for kind in type(model).__mro__ if kind.__module__.startswith("peft.")]
        if not any(kind.__name__ == "PeftModel" for kind in kinds):
            return None
        wrapper: Any = model
        if wrapper.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"the adapter is {wrapper.active_peft_config.peft_type.value}, whose tokens are "
                "put in outside of the model; take one within its layers: LoraConfig(...)"
            )
        return cls(wrapper)

    def _parts(self, model: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
        """(name, module, name in the module, this rank's part) of what a folder holds: adapters,
        and what else is trained."""
        return [
            (f"{path}.{key}", module, key, p)
            for path, module in sorted(model.named_modules(remove_duplicate=False))
            for key, p in module._parameters.items()
            if p is not None
            and (p.requires_grad or any(f"{path}.".startswith(each) for each in self._saved))
        ]

    @torch.no_grad()
    def save(self, model: nn.Module, folder: Path | str, *, mesh: Mesh | None = None) -> None:
        """Write the adapters as PEFT's save_pretrained does. Collective: every rank must call it.

        Args:
            model: `inner`, as it was shared out, its parameters with memory.
            folder: Written beside its place and renamed; an adapter's folder there is replaced.
            mesh: Of all ranks; None: this process has the whole model.

        Raises:
            HubError: On every rank, for a folder of something else, and a disk that is full.
        """
        position, folder = Position.of(mesh), Path(folder)
        with ranks_agree(position.group):
            _check_folder(folder)
        found: dict[str, Tensor] = {}
        for name, module, key, tensor in self._parts(model) if position.writes_part else ():
            whole = gathered(module, key, tensor, position.ranks)
            if whole is not None:
                found[name] = whole.cpu().clone()
        stages = gather(found, group=ALONE if mesh is None else mesh.group("pp") or ALONE)
        aside = folder.with_name(folder.name + ".tmp")
        with ranks_agree(position.group):
            if position.first:
                state = {self._prefix + n: t for stage in stages for n, t in stage.items()}
                try:
                    shutil.rmtree(aside, ignore_errors=True)
                    # Whether the vocabulary was changed PEFT would ask of the hub.
                    self._empty.save_pretrained(
                        str(aside), state_dict=state, save_embedding_layers=False
                    )
                    replace_folder(folder, aside)
                except OSError as error:
                    raise HubError(
                        f"{folder} can't be written: {error.strerror or error}; make room or "
                        "choose another place"
                    ) from None
                finally:
                    shutil.rmtree(aside, ignore_errors=True)


def _check_folder(folder: Path) -> None:
    """HubError for a folder with anything but adapters."""
    if not os.path.lexists(folder):
        return
    there = sorted(os.listdir(folder)) if folder.is_dir() else [folder.name]
    foreign = [
        name for name in there if name not in FILES and not (folder / name / CONFIG).is_file()
    ]
    if foreign:
        raise HubError(
            f"{folder} is there already and holds {', '.join(foreign[:3])}; a save replaces a "
            "folder of adapters and nothing else: remove it, or name another place"
        )
