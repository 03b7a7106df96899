"""Options of the optimizers that communicate by themselves, beside those that torch.optim has.

    OneBitAdam(model.parameters(), lr=3e-4, config=OneBitConfig(warmup_steps=400))

Each optimizer has a class of its own: OneBitConfig, OneBitLAMBConfig, ZeroOneConfig.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

from torch import nn

from pyops.comm.compression.codec import Codec
from pyops.comm.compression.one_bit import OneBit
from pyops.mesh import ProcessGroupLike
from pyops.optim.fused.input_checks import check_number, check_switch
from pyops.renamed import refuse_renamed

__all__ = [
    "CommunicatingConfig",
    "LocalOptions",
    "OneBitConfig",
    "OneBitLAMBConfig",
    "ZeroOneConfig",
    "check_communication",
    "checked_config",
    "frozen_beta2_of",
    "plain_options",
    "with_limit",
]

C = TypeVar("C", bound="CommunicatingConfig")
LOCAL = ("max_grad_norm", "zero_grad", "master_weights")  # the keys of LocalOptions
COMPAT = (None, "deepspeed")
REDUCTIONS = ("mean", "sum")


class LocalOptions(TypedDict, total=False):
    """Options of the step itself, which AdamW and LAMB of pyops.optim have too.

    max_grad_norm clips by the same factor on every rank. With local gradients the norm is that of
    the ranks' root mean square.
    """

    max_grad_norm: float | None
    zero_grad: bool
    master_weights: bool


@dataclass(frozen=True, kw_only=True)
class CommunicatingConfig:
    """Options of every optimizer that communicates by itself."""

    warmup_steps: int | str
    """Exact steps before the switch to compressed messages, at least 1, or "auto": until the second
    moment is stable (see pyops.optim.one_bit.Warmup)."""

    group: ProcessGroupLike = None
    """The ranks, which all step alike: see `pyops.mesh.resolve`."""

    model: nn.Module | None = None
    """The DistributedDataParallel or DataParallel that reduces gradients during backward in the
    warm-up; the optimizer sets its require_backward_grad_sync to False at the switch. None: nobody
    reduces gradients, and step() does it."""

    reduction: str = "mean"
    """"mean", or "sum" where the ranks' losses are parts of a sum: the gradient is then the sum of
    the ranks' gradients."""

    codec: Codec | None = None
    """How momenta are encoded; None: OneBit()."""

    total_steps: int | None = None
    """Steps of the run; a warm-up that is not shorter is warned about."""


@dataclass(frozen=True, kw_only=True)
class OneBitConfig(CommunicatingConfig):
    """Options of OneBitAdam."""

    precondition: bool | None = None
    """Whether m / (sqrt(v) + eps) is sent (True, the default), or m as in the paper."""

    frozen_beta2: float | None = None
    """Decay of the mean of squared gradients that the switch keeps. None: 1 - 2 / warmup_steps
    (0.995 with "auto"), if that is more than beta2: a variance that never changes again should not
    be that of the last few batches. With beta2 itself the step is continuous to rounding."""

    compat: str | None = None
    """"deepspeed" steps as DeepSpeed 0.19.6 does: no bias correction in either phase, hence longer
    first steps, and m is sent with one scale for the whole of it. Its first call, which throws a
    gradient away, is not imitated."""


@dataclass(frozen=True, kw_only=True)
class OneBitLAMBConfig(OneBitConfig):
    """Options of OneBitLAMB. With compat="deepspeed" the mean of trust ratios is not corrected
    either and takes in only ratios that are not 1; m is sent times its layer's number."""

    max_coeff: float = 10.0
    """Upper bound of the trust ratio: LAMB's max_ratio."""

    min_coeff: float = 0.01
    """Lower bound of the trust ratio: LAMB's min_ratio."""

    coeff_beta: float = 0.9
    """Decay of the trust ratio's running mean, which leaves out steps where a norm was 0."""

    factor_max: float = 4.0
    """Upper bound of the factor by which the kept trust ratio is multiplied."""

    factor_min: float = 0.5
    """Lower bound of that factor."""

    factor_threshold: float = 0.1
    """By how much of itself that factor may change in a step."""

    def check_coefficients(self, who: str) -> None:
        """Raises TypeError or ValueError for bounds and decays that make no sense."""
        names = ("min_coeff", "max_coeff", "factor_min", "factor_max", "coeff_beta")
        values = {name: getattr(self, name) for name in (*names, "factor_threshold")}
        for name, value in values.items():
            check_number(value, name=name, who=who)
        for least, most in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
            if not 0 <= values[least] <= values[most] or math.isinf(values[least]):
                raise ValueError(
                    f"{who}: {least}={values[least]} and {most}={values[most]} must satisfy "
                    f"0 <= {least} <= {most}"
                )
        if not 0 < self.factor_min <= 1 <= self.factor_max:
            raise ValueError(
                f"{who}: factor_min={self.factor_min} and factor_max={self.factor_max} must "
                "satisfy 0 < factor_min <= 1 <= factor_max"
            )
        for name in ("coeff_beta", "factor_threshold"):
            if not 0 <= values[name] < 1:
                raise ValueError(f"{who}: {name}={values[name]} must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class ZeroOneConfig(CommunicatingConfig):
    """Options of ZeroOneAdam. With the defaults a run of 2,000 steps sends less than 1/60 of what
    an fp32 all-reduce in each step would."""

    warmup_steps: int | str = "auto"
    """The step at which the variance freezes (DeepSpeed's var_freeze_step); "auto": a fifth of
    total_steps, else 400."""

    var_update_scaler: int = 2
    """How many exact rounds there are at each distance 1, 2, 4 ... of steps; the freeze is one
    more."""

    local_step_scaler: int = 8
    """After how many steps the distance between messages doubles, once the variance is frozen."""

    local_step_clipper: int = 5
    """The largest distance between messages, in steps. One bit for the sum of many steps says less
    than one bit for each: docs/compression.md has what distances cost."""

    variance_codec: Codec | None = None
    """How the variance is encoded in exact rounds; None: BF16(). Identity() is exact, and twice as
    many bytes."""


def checked_config(
    who: str, config: object, config_class: type[C], options: Mapping[str, Any]
) -> C:
    """The config, which is one of that class.

    Raises:
        TypeError: for anything else, and for a keyword in `options` that the optimizer does not
            have; the error names the field of the config where it is now one.
    """
    names = {each.name: each.name for each in fields(config_class)} | {"op": "reduction"}
    instead = {old: f"config={config_class.__name__}({new}=...)" for old, new in names.items()}
    refuse_renamed(who, {key: options[key] for key in options if key not in LOCAL}, instead)
    if not isinstance(config, config_class):
        raise TypeError(
            f"{who}: config is {config!r}; it must be a {config_class.__name__}, such as "
            f"{config_class.__name__}(warmup_steps=400)"
        )
    return config


def with_limit(options: LocalOptions) -> dict[str, Any]:
    """The same for the plain optimizer, with a limit of infinity in place of none: gradients are
    not clipped then, but their norm is taken, which finds what is not finite."""
    limit = options.get("max_grad_norm")
    return {**options, "max_grad_norm": math.inf if limit is None else limit}


def frozen_beta2_of(config: OneBitConfig, who: str) -> float:
    """The decay of the slower mean of squares, 0 where there is none.

    Raises:
        TypeError: for one that is no number.
        ValueError: for one that is not in [0, 1).
    """
    if config.frozen_beta2 is not None:
        check_number(config.frozen_beta2, name="frozen_beta2", who=who)
        if not 0 <= config.frozen_beta2 < 1:
            raise ValueError(
                f"{who}: frozen_beta2={config.frozen_beta2} must be in [0, 1), such as 0.999, or "
                "None; it is used where it is more than beta2"
            )
        return config.frozen_beta2
    if config.compat is not None:
        return 0.0
    steps = config.warmup_steps
    return max(0.0, 1 - 2 / steps) if isinstance(steps, int) else 0.995


def check_communication(config: OneBitConfig, who: str) -> Codec:
    """The codec of momenta.

    Raises:
        TypeError, ValueError: for options of communication that make no sense.
    """
    if config.reduction not in REDUCTIONS:
        raise ValueError(
            f"{who}: reduction={config.reduction!r} must be 'mean' (as DistributedDataParallel "
            "reduces) or 'sum'"
        )
    if config.compat not in COMPAT:
        raise ValueError(f"{who}: compat={config.compat!r} must be one of {COMPAT}")
    if config.precondition is not None:
        check_switch(config.precondition, name="precondition", who=who)
    _check_model(config, who)
    codec = config.codec
    if codec is None:
        codec = OneBit(block=None, rule="rms") if config.compat == "deepspeed" else OneBit()
    if not isinstance(codec, Codec):
        raise TypeError(f"{who}: codec={codec!r} must be a codec of pyops.comm, such as OneBit()")
    if hasattr(codec, "all_reduce"):
        raise ValueError(
            f"{who}: codec={codec.name} needs matrices, and momenta are sent as one flat tensor; "
            "give OneBit() or Int8()"
        )
    return codec


def _check_model(config: CommunicatingConfig, who: str) -> None:
    model = config.model
    if model is not None and not hasattr(model, "require_backward_grad_sync"):
        raise TypeError(
            f"{who}: model is a {type(model).__name__} without require_backward_grad_sync; give "
            "the DistributedDataParallel or pyops DataParallel that reduces gradients, or None "
            "when nobody does"
        )
    reducer = getattr(model, "reducer", None)
    of_model = getattr(reducer, "reduction", getattr(reducer, "op", config.reduction))
    if of_model != config.reduction:
        raise ValueError(
            f"{who}: reduction={config.reduction!r}, but the model reduces gradients with "
            f"{of_model!r}; give reduction={of_model!r}"
        )


def plain_options(config: CommunicatingConfig) -> dict[str, str]:
    """The fields of a config as ranks compare them; of objects, their names, or whether there is
    one."""
    found = {}
    for name in (each.name for each in fields(config) if each.name != "group"):
        value = getattr(config, name)
        if name == "model":
            value = "None" if value is None else "given"
        elif isinstance(value, Codec):
            value = value.name
        elif isinstance(value, int | float) and not isinstance(value, bool):
            value = f"{value:g}"
        found[name] = str(value)
    return found
