"""ImagesTask: what is on an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyops.context_parallel import ContextRanks
from pyops.data import Images
from pyops.data.images import copies, enlarged
from pyops.mesh import ALONE
from pyops.models import CoAtNet, CoAtNetConfig, ViT, ViTConfig
from pyops.tensor_parallel import RanksLike
from pyops.tensor_parallel.grids import Grid
from pyops.train.tasks.task import Task

__all__ = ["ImagesTask"]


class ImagesTask(Task):
    """What is on the image: count copies of each are trained on, and the held-out ones are scored
    as they are."""

    def __init__(
        self,
        name: str,
        config: ViTConfig | CoAtNetConfig,
        parts: tuple[Images, Images],
        *,
        count: int,
        dtype: torch.dtype,
    ) -> None:
        self.name, self._config, self._dtype = name, config, dtype
        train, kept = parts
        self._labels = (train.labels, kept.labels)
        self._images = (copies(train.images, count), kept.images[:, None])
        self.samples, self.held_out = (each.shape[:2].numel() for each in self._images)
        self.block_count, self.tokens = config.num_layers, config.num_tokens
        self._side = config.image_size
        if isinstance(config, CoAtNetConfig):
            self.first_layer, self.told_shape = "stem", False

    def model(
        self,
        *,
        seed: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        context: ContextRanks | None = None,
        group: RanksLike | Grid = ALONE,
    ) -> nn.Module:
        """See `Task.model`.

        Args:
            seed, device, dtype, context: As there.
            group: The ranks that share the layers of a ViT, or a grid of them.
        """
        if isinstance(self._config, ViTConfig):
            where: dict[str, Any] = {"device": device, "dtype": dtype}
            return ViT(self._config, group=group, context=context, seed=seed, **where)
        return CoAtNet(self._config, seed=seed, device=device, dtype=dtype)

    def _rows(self, rows: Tensor, epoch: int, held_out: bool) -> tuple[Tensor, Tensor]:
        images = self._images[held_out]
        image, copy = rows // images.shape[1], rows % images.shape[1]
        found = enlarged(images[image, copy], self._side)
        return found.to(self._dtype), self._labels[held_out][image]
