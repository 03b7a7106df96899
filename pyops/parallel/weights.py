"""ModelSource: where a model's values come from, a module or a Hugging Face folder, and how they go
back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from pyops.comm.agreement import ranks_agree
from pyops.hub.pretrained import Adapters, PretrainedWeights, empty_model, save_pretrained
from pyops.mesh import Mesh
from pyops.parallel.stages.layered_model import LayeredModel

__all__ = ["ModelSource"]


class ModelSource:
    """A model, and what fills its parameters.

    Args:
        model: The whole model; that of a folder is on the meta device.
        weights: Of the folder; None where the model has its values.
        folder: Where it came from.
        adapters: What PEFT has put into its layers.
        layered: What the model says of its layers, where it was written for several ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: PretrainedWeights | None = None,
        folder: Path | None = None,
        adapters: Adapters | None = None,
        layered: LayeredModel | None = None,
    ) -> None:
        self.model, self._weights, self.folder = model, weights, folder
        self._adapters, self.layered = adapters, layered
        self._problem: Exception | None = None

    @classmethod
    def of(cls, model: Any) -> ModelSource:
        """Of what `parallelize` was given.

        Raises:
            TypeError: It is neither a module, nor a LayeredModel, nor a folder.
            ValueError: It has adapters that are not within its layers.
            HubError: The folder can't be read.
        """
        if isinstance(model, LayeredModel):
            return cls(model.module, layered=model)
        if isinstance(model, nn.Module):
            adapters = Adapters.of(model)
            return cls(model if adapters is None else adapters.inner, adapters=adapters)
        if not isinstance(model, Path | str):
            raise TypeError(
                f"model is a {type(model).__name__}; give a torch.nn.Module, or a folder that "
                "save_pretrained of transformers wrote"
            )
        made = empty_model(model)
        weights = PretrainedWeights(model)
        weights.check(made)
        return cls(made, weights, Path(model))

    @property
    def fill(self) -> Any:
        """Gives one module its values once it has memory; None where it has them."""
        if self.layered is not None:
            return self.layered.initialize
        return None if self._weights is None else self._fill

    def _fill(self, module: nn.Module) -> None:
        """An error is kept for `finish`: the other ranks wait for this one meanwhile."""
        assert self._weights is not None
        try:
            self._weights.fill(module)
        except Exception as error:
            self._problem = self._problem or error

    def finish(self) -> None:
        """After the last module. A collective.

        Raises:
            HubError: On every rank, for what could not be read on any.
        """
        with ranks_agree():
            if self._weights is not None and self._problem is None:
                self._weights.fill_buffers(self.model)
                self._weights.close()
            if self._problem is not None:
                raise self._problem

    def save(self, folder: Path, mesh: Mesh) -> None:
        """Write the model, as it is shared out, as a Hugging Face folder, or the adapters in it as
        one of PEFT. A collective.

        Raises:
            TypeError: The model is none of transformers.
        """
        if self.layered is not None:
            raise TypeError(
                f"{type(self.model).__name__} is a LayeredModel's, and no model of transformers, "
                "of which a folder could be written; give Trainer.save(folder)"
            )
        if self._adapters is not None:
            self._adapters.save(self.model, folder, mesh=mesh)
            return
        save_pretrained(self.model, folder, mesh=mesh, tokenizer_from=self.folder)
