"""ZeroConfig: the options of ZeroOptimizer, and the section [zero] of a run's TOML file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pyops.comm.compression.codec import Codec
from pyops.comm.compression.eight_bit import FP8, Int8
from pyops.comm.compression.floats import BF16
from pyops.precision import LossScale, Precision

__all__ = ["ZeroConfig", "refuse_options_of_config"]

# Not a key of TOML: a Python object, or something that another section of a run says.
IN_PYTHON = {"toml": False}

# Names of earlier versions, where they were arguments of ZeroOptimizer.
RENAMED = {
    "op": "reduction",
    "overlap": "overlap_grad_reduce=True or False; overlap='forward' is overlap_param_gather=True",
    "initialise": "initialize",
}


@dataclass(frozen=True)
class ZeroConfig:
    """What the ranks of data-parallel training share out, and how (Rajbhandari et al., ZeRO, SC
    2020, arXiv:1910.02054).

    `validate` checks the values. ZeroOptimizer calls it on all ranks together, and a run's Config
    when it is made; making a ZeroConfig checks nothing, so that no rank fails alone.
    """

    stage: int = 0
    """What is spread over the ranks. 0: nothing. 1: optimizer states and float32 master weights.
    2: gradients too. 3: parameters too."""

    offload: str = "none"
    """Where states and master weights are kept: "none" (beside the parameters), "cpu" (host memory)
    or a folder on a fast disk. At stage 3 the folder also holds the parameters."""

    tile_bytes: int = 32 << 20
    """How many bytes of offloaded states are stepped at a time. A folder takes three times as much
    host memory."""

    overlap_grad_reduce: bool = True
    """Whether gradients are reduced, and parameters gathered, while the model computes."""

    overlap_param_gather: bool = field(default=False, metadata=IN_PYTHON)
    """Whether step() returns while parameters are still gathered, and each layer of the next
    forward waits for its own. Between step() and forward, look at parameters within
    `whole_parameters()` and in state dicts only. Needs overlap_grad_reduce."""

    bucket_bytes: int = field(default=25 << 20, metadata=IN_PYTHON)
    """How many bytes are reduced, and gathered, in one collective."""

    max_grad_norm: float | None = field(default=None, metadata=IN_PYTHON)
    """Clip the gradients of all ranks and param groups together to this 2-norm; `grad_norm` of the
    optimizer is the norm before. A step whose gradients hold an inf or a nan changes nothing.
    None: no clipping."""

    reduction: str = field(default="mean", metadata=IN_PYTHON)
    """How gradients of the ranks are combined: "mean", or "sum" for a loss that is divided by the
    global number of samples already."""

    delayed_update: bool | int = field(default=False, metadata=IN_PYTHON)
    """With offload: apply a step's gradients on a thread while the next step computes, so the model
    has the result one step late (Ren et al., ZeRO-Offload, arXiv:2101.06840, section 5.2). An
    integer is the number of steps that are taken in the ordinary way first, 40 say. Call
    `finish_update()` at the end."""

    units: Callable[[str, nn.Module], bool] | Sequence[nn.Module] | None = field(
        default=None, metadata=IN_PYTHON
    )
    """Stage 3: the modules whose parameters are gathered together, as a function of (path, module)
    or as a list. None: the children of every ModuleList and Sequential. Parameters that are in no
    unit, or in several, are gathered before forward and kept until backward ends."""

    whole_below: int = field(default=0, metadata=IN_PYTHON)
    """Stage 3: parameters of fewer elements than this stay whole on every rank."""

    gather_codec: Codec | None = field(default=None, metadata=IN_PYTHON)
    """Stage 3: Int8(), FP8() or BF16(), in which parameters are gathered; None: as they are (Wang
    et al., ZeRO++, arXiv:2306.10209, qwZ)."""

    reduce_codec: Codec | None = field(default=None, metadata=IN_PYTHON)
    """Stages 1 to 3: Int8(), FP8() or BF16(), in which gradients travel to their owners, who add
    them up in float32; None: as they are (ZeRO++, qgZ)."""

    secondary_group: dist.ProcessGroup | None = field(default=None, metadata=IN_PYTHON)
    """Stage 3: the ranks of this rank's node, say, among which backward gathers parameters that
    forward has gathered from all ranks (ZeRO++, hpZ). The groups must divide all ranks evenly."""

    symmetric_step: bool = field(default=False, metadata=IN_PYTHON)
    """Stages 1 and 2 with Adam or AdamW of pyops: whether gradients and parameters lie in symmetric
    memory, and one kernel adds the ranks' gradients, steps and stores the parameters into every
    rank's memory. Backward then sends nothing, several backwards add up locally, and whole
    gradients keep their memory also at stage 2. Where any rank has no symmetric memory, all ranks
    step as without it, which rank 0 says once. Without max_grad_norm, a loss scale, offload,
    codecs, overlap_param_gather, tp_group and pp_group. Unverified on GPU."""

    precision: Precision | str | None = field(default=None, metadata=IN_PYTHON)
    """"fp32", "bf16", "fp16" or a pyops.precision.Precision: the model's parameters and buffers are
    cast to it. None: the model stays as it is. Inputs are the caller's."""

    loss_scale: LossScale | None = field(default=None, metadata=IN_PYTHON)
    """The loss scale of a precision that needs one, such as fp16; None: LossScale() with its
    defaults. The optimizer updates this object, so give each its own."""

    initialize: Callable[[nn.Module], None] | None = field(default=None, metadata=IN_PYTHON)
    """For a model on the meta device: fills the parameters and buffers of one module, not of its
    children; rank 0's values are taken. None: module.reset_parameters()."""

    device: torch.device | str | None = field(default=None, metadata=IN_PYTHON)
    """Where parameters of a model on the meta device get their memory. None: where the model's
    other tensors are, or the CPU."""

    @property
    def offload_target(self) -> str | None:
        """ "cpu" or a folder; None where nothing is offloaded."""
        return None if self.offload == "none" else self.offload

    def validate(self, prefix: str = "ZeroOptimizer: ") -> None:
        """Check every field, and what goes together. Local: no rank is asked.

        Args:
            prefix: begins the message, before the name of the field.

        Raises:
            TypeError, ValueError: naming field, value and fix.
        """
        try:
            self._check_values()
            self._check_combinations()
            self._check_codecs()
        except (TypeError, ValueError) as error:
            raise type(error)(f"{prefix}{error}") from None

    def _check_values(self) -> None:
        sizes = [
            (name, getattr(self, name), least)
            for name, least in (("bucket_bytes", 1), ("tile_bytes", 1), ("whole_below", 0))
        ]
        if isinstance(self.stage, bool) or self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage is {self.stage!r}; it must be 0, 1, 2 or 3")
        for name, value, least in sizes:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; give a whole number, {least} or more")
        norm = self.max_grad_norm
        if norm is not None and not (isinstance(norm, int | float) and norm > 0):
            raise ValueError(
                f"max_grad_norm is {norm!r}; give a positive number, or None not to clip"
            )
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {self.reduction!r}; choose 'mean' or 'sum'")
        for name in ("overlap_grad_reduce", "overlap_param_gather", "symmetric_step"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; expected True or False")
        if not isinstance(self.offload, str) or not (
            self.offload in ("none", "cpu") or "/" in self.offload or os.path.isdir(self.offload)
        ):
            raise ValueError(
                f"offload is {self.offload!r}; it must be 'none', 'cpu' or a folder such as "
                "'/fast/disk'"
            )

    def _check_combinations(self) -> None:
        delayed = self.delayed_update
        if self.symmetric_step and self.stage not in (1, 2):
            raise ValueError(
                f"symmetric_step is True, but stage is {self.stage}; it is for stages 1 and 2"
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError(
                "overlap_param_gather is True, but overlap_grad_reduce is False; set both, or "
                "neither"
            )
        if not isinstance(delayed, bool | int):
            raise TypeError(
                f"delayed_update is {delayed!r}; give True, False, or the number of steps before "
                "updates are delayed"
            )
        if delayed is False:
            return
        if delayed < 0:
            raise ValueError(
                f"delayed_update is {delayed}; give the number of steps before updates are "
                "delayed, 0 or more"
            )
        if self.offload == "none":
            raise ValueError(
                f"delayed_update is {delayed}, but offload is 'none': states on the device have "
                "nothing to wait for; give an offload, or leave delayed_update out"
            )
        if self.stage == 3 and self.offload != "cpu":
            raise ValueError(
                f"delayed_update is {delayed}, but at stage 3 the parameters are in "
                f"{self.offload} too; use offload='cpu', or stage 2"
            )

    def _check_codecs(self) -> None:
        codecs = (
            ("gather_codec", self.gather_codec, (3,)),
            ("reduce_codec", self.reduce_codec, (1, 2, 3)),
        )
        for name, codec, stages in codecs:
            if codec is None:
                continue
            if not isinstance(codec, Int8 | FP8 | BF16):
                raise TypeError(
                    f"{name} is {codec!r}; give pyops.comm.Int8(), FP8() or BF16(), or None"
                )
            if getattr(codec, "stochastic_rounding", False) and name == "gather_codec":
                raise ValueError(
                    f"{name} is {codec!r}, which rounds at random, but all gathers of a step must "
                    f"give the same values; use {type(codec).__name__}()"
                )
            if self.stage not in stages:
                raise ValueError(
                    f"{name} has no meaning at stage {self.stage}; it is for stage "
                    f"{' and '.join(map(str, stages))}"
                )
        if self.secondary_group is None:
            return
        if not isinstance(self.secondary_group, dist.ProcessGroup):
            raise TypeError(
                f"secondary_group is {self.secondary_group!r}; give the process group of this "
                "rank's node, or None"
            )
        if self.stage != 3:
            raise ValueError(
                f"secondary_group has no meaning at stage {self.stage}; it is for stage 3, which "
                "gathers parameters"
            )


def refuse_options_of_config(arguments: Mapping[str, Any]) -> None:
    """TypeError for an argument that is meant for ZeroConfig and was given to ZeroOptimizer, which
    hands what it does not know to the inner optimizer."""
    own = {each.name for each in fields(ZeroConfig)}
    for name, value in arguments.items():
        if name in RENAMED:
            raise TypeError(
                f"ZeroOptimizer: {name}={value!r} has a new name and place: "
                f"ZeroConfig({RENAMED[name] if '=' in RENAMED[name] else f'{RENAMED[name]}=...'})"
            )
        if isinstance(value, ZeroConfig):
            raise TypeError(
                f"ZeroOptimizer: {name} is a ZeroConfig; give it by position, as "
                "ZeroOptimizer(model, optimizer, ZeroConfig(...)), or as zero="
            )
        if name in own:
            raise TypeError(
                f"ZeroOptimizer: {name}={value!r} is an option of ZeroConfig; write "
                f"ZeroOptimizer(model, optimizer, ZeroConfig({name}=...))"
            )
