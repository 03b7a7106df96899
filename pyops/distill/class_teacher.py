"""ClassTeacher: what a teacher says of numbered samples, each of which it is asked about once.

batch    samples [n], inputs [n, ...], labels [n]
         --> targets [n, 1 + C], the label and the teacher's logits, for the loss of a student
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyops.distill.distillation import DistillationConfig
from pyops.distill.logits import logits_divergence

__all__ = ["ClassTeacher"]


class ClassTeacher:
    """The logits of a classifier by the numbers of samples, whose inputs never change.

    Args:
        logits_of: the frozen teacher: inputs [n, ...] -> logits [n, C], on any device.
        samples: how many there are.
        config: see `DistillationConfig`; hidden states are not compared.
    """

    def __init__(
        self, logits_of: Callable[[Tensor], Tensor], *, samples: int, config: DistillationConfig
    ) -> None:
        self._logits_of, self.config = logits_of, config
        self._known = torch.zeros(samples, dtype=torch.bool, device="cpu")
        self._logits = torch.zeros(0, 0, device="cpu")

    def targets(self, samples: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """What `total` takes of these samples, fp32 [n, 1 + C].

        Args:
            samples: int64 [n], from 0 on.
            inputs: [n, ...], of the teacher.
            labels: int64 [n]; -100 does not count.
        """
        new = ~self._known[samples]
        if new.any():
            with torch.no_grad():
                found = self._logits_of(inputs[new]).float().cpu()
            if not len(self._logits):
                self._logits = found.new_zeros(len(self._known), found.shape[1])
            self._logits[samples[new]] = found
            self._known[samples[new]] = True
        return torch.cat([labels.float()[:, None], self._logits[samples]], dim=1)

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of a student, summed over the samples that count.

        Args:
            logits: [n, C], the student's.
            targets: [n, 1 + C], as of `targets`.
        """
        config = self.config
        summed = logits_divergence(
            logits,
            targets[:, 1:],
            targets[:, 0].long(),
            reduction="sum",
            config=config.divergence(),
        )
        return (config.soft + config.hard) * summed
