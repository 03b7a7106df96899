"""A run's configuration: a TOML file, whose sections are the frozen dataclasses of the rooms they configure.

    name = "small"          # outputs go to <train.folder>/<name>/
    [model]                 # pyops.models.GPTConfig
    [data]                  # pyops.data.DataConfig
    [optimizer]             # OptimizerConfig
    [communication]         # CommunicationConfig
    [precision]             # PrecisionConfig
    [zero]                  # ZeroConfig
    [recompute]             # RecomputeConfig
    [parallel]              # pyops.parallel.ParallelConfig
    [train]                 # TrainConfig

`load_config(path, overrides=["train.steps=10"])` reads it. What is wrong is a ConfigError that names the key, its value
and the fix; nothing has been started by then.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from pyops.comm.codec import parse
from pyops.data import DataConfig
from pyops.models import GPTConfig
from pyops.parallel import ParallelConfig
from pyops.precision import PRECISIONS

__all__ = [
    "CommunicationConfig",
    "Config",
    "ConfigError",
    "OptimizerConfig",
    "ParallelConfig",
    "RecomputeConfig",
    "TrainConfig",
    "ZeroConfig",
    "load_config",
]


class ConfigError(ValueError):
    """A configuration can't be used; the message names the key, its value and the fix."""


def _require(config: Any, condition: str, fields: Sequence[str], holds: Any) -> None:
    for name in fields:
        if not holds(getattr(config, name)):
            raise ValueError(f"{name} is {getattr(config, name)!r}; it must be {condition}")


COMMUNICATING = ("onebit_adam", "onebit_lamb", "zero_one_adam")
OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "lamb", "lars", "adafactor", "adagrad", *COMMUNICATING)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, and the learning rate's way: a straight warmup, then half a cosine down to `final_lr_ratio` of the peak.

    name: of `OPTIMIZERS`. beta1 and beta2 are those of Adam, Lion and LAMB and their one-bit kin, eps of these (but Lion) and
    of Adagrad, momentum of SGD and LARS. max_grad_norm: gradients with a larger norm are scaled down to it; 0: never.
    weight_decay goes to weights of two or more dimensions only.

    compression_warmup_steps: how long a one-bit optimizer communicates in full before it compresses; "auto": until the
    variance is stable. A fifth of the run is a good choice.
    """

    name: str = "adamw"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    warmup_steps: int = 100
    final_lr_ratio: float = 0.1
    compression_warmup_steps: int | str = "auto"

    def __post_init__(self) -> None:
        _require(self, f"one of {', '.join(OPTIMIZERS)}", ("name",), lambda v: v in OPTIMIZERS)
        _require(self, "more than 0", ("lr", "eps"), lambda v: v > 0)
        _require(self, "0 or more, and less than 1", ("beta1", "beta2", "momentum"), lambda v: 0 <= v < 1)
        _require(self, "0 or more", ("weight_decay", "max_grad_norm", "warmup_steps"), lambda v: v >= 0)
        _require(self, "between 0 and 1", ("final_lr_ratio",), lambda v: 0 <= v <= 1)
        _require(
            self, '1 or more, or "auto"', ("compression_warmup_steps",), lambda v: v == "auto" if isinstance(v, str) else v >= 1
        )

    @property
    def communicates(self) -> bool:
        """Whether the optimizer itself communicates, once its warm-up is over."""
        return self.name in COMMUNICATING

    def lr_at(self, step: int, *, num_steps: int) -> float:
        """The learning rate of step 0, 1, ..., num_steps - 1."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
        return self.lr * (self.final_lr_ratio + (1 - self.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class CommunicationConfig:
    """How gradients, or the momenta of one-bit optimizers, go over the wire.

    codec: "none" for full precision (one-bit optimizers then take "onebit"), or what `pyops.comm.codec.parse` knows: bf16,
    int8, fp8, onebit, ...
    """

    codec: str = "none"

    def __post_init__(self) -> None:
        if self.codec != "none":
            parse(self.codec)


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtype of parameters, activations and gradients; the optimizer has fp32 master weights where it is of 16 bits.

    dtype: fp32, bf16, or fp16, whose gradients would vanish without a loss scale: it begins at initial_scale, doubles after
    scale_window good steps in a row, and halves when `hysteresis` steps overflowed, never below minimum_scale.
    """

    dtype: str = "fp32"
    initial_scale: float = 65536.0
    scale_window: int = 1000
    hysteresis: int = 2
    minimum_scale: float = 1.0

    def __post_init__(self) -> None:
        _require(self, f"one of {', '.join(PRECISIONS)}", ("dtype",), lambda v: v in PRECISIONS)
        _require(self, "more than 0", ("minimum_scale",), lambda v: v > 0)
        _require(self, f"at least minimum_scale, {self.minimum_scale:g}", ("initial_scale",), lambda v: v >= self.minimum_scale)
        _require(self, "1 or more", ("scale_window", "hysteresis"), lambda v: v >= 1)


@dataclass(frozen=True)
class ZeroConfig:
    """What the ranks share out, each keeping 1 / N of it (Rajbhandari et al., ZeRO, SC 2020).

    stage: 0 nothing, 1 optimizer states and fp32 masters, 2 gradients too, 3 parameters too. overlap: communicate while
    forward and backward compute. offload: where states lie: "none" (on the device), "cpu", or a folder on a fast disk.
    tile_mib: how much of offloaded states is stepped at a time; a folder takes three times as much memory.
    """

    stage: int = 0
    overlap: bool = True
    offload: str = "none"
    tile_mib: float = 32.0

    def __post_init__(self) -> None:
        _require(self, "0, 1, 2 or 3", ("stage",), lambda v: v in (0, 1, 2, 3))
        _require(self, "0.0625 (64 KiB) or more, such as 32", ("tile_mib",), lambda v: v >= 0.0625)
        _require(self, "none, cpu or a folder such as /fast/disk", ("offload",), lambda v: v in ("none", "cpu") or "/" in v)
        if self.offload != "none" and not self.stage:
            raise ValueError(f"offload is {self.offload!r}, but stage is 0, which keeps states on the device: set stage to 1")


@dataclass(frozen=True)
class RecomputeConfig:
    """Activations that are not kept for backward, but computed again (Chen et al., arXiv:1604.06174).

    modules: which ones, by patterns of their names, such as ["blocks.*"]; their inputs are kept. offload: where: "none" (on
    the device) or "cpu".
    """

    modules: tuple[str, ...] = ()
    offload: str = "none"

    def __post_init__(self) -> None:
        _require(self, "none or cpu", ("offload",), lambda v: v in ("none", "cpu"))


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at a time, on what, and what is kept.

    batch: sequences in a step, over all ranks. micro_batch: sequences that a rank puts through the model at once; 0: all
    of its share. device: "auto" is cuda where there is one. deterministic: on CUDA, only kernels that give the same bits each
    time. algorithm: of the all-reduce (pyops.comm.all_reduce). validate_every, checkpoint_every: steps; 0: only at the end.
    keep: checkpoints that stay.
    """

    steps: int = 1000
    batch: int = 32
    micro_batch: int = 0
    seed: int = 0
    device: str = "auto"
    compile: bool = False
    deterministic: bool = True
    algorithm: str = "auto"
    bucket_mib: float = 25.0
    log_every: int = 10
    validate_every: int = 100
    validation_sequences: int = 128
    checkpoint_every: int = 200
    keep: int = 2
    sample_tokens: int = 300
    folder: str = "runs"

    def __post_init__(self) -> None:
        _require(self, "1 or more", ("steps", "batch", "log_every", "keep", "validation_sequences"), lambda v: v >= 1)
        _require(
            self,
            "0 or more",
            ("micro_batch", "validate_every", "checkpoint_every", "sample_tokens", "seed"),
            lambda v: v >= 0,
        )
        _require(self, "at least one byte, 1e-6, such as 25", ("bucket_mib",), lambda v: v * 2**20 >= 1)
        _require(self, "auto, cpu or cuda", ("device",), lambda v: v in ("auto", "cpu", "cuda"))
        _require(self, "auto, native, ring, two_shot or shared_memory", ("algorithm",),
                 lambda v: v in ("auto", "native", "ring", "two_shot", "shared_memory"))  # fmt: skip


@dataclass(frozen=True)
class Config:
    """All of a run."""

    name: str = "run"
    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"name is {self.name!r}; it becomes a folder: give it letters, digits, - and _")
        if self.data.tokenizer == "bytes" and self.model.vocab_size < 256:
            raise ValueError(f"model.vocab_size is {self.model.vocab_size}; data.tokenizer 'bytes' has 256 tokens: set 256")
        self._check_sharing()
        if self.optimizer.communicates and hasattr(parse(self.communication.codec), "all_reduce"):
            raise ValueError(
                f"communication.codec is {self.communication.codec!r}, which needs matrices; the momenta of optimizer.name = "
                f"{self.optimizer.name!r} travel as one flat tensor: set the codec to onebit or int8"
            )

    def _check_sharing(self) -> None:
        """What doesn't go with [zero] or [parallel]."""
        tp, pp, optimizer = self.parallel.tp, self.parallel.pp, self.optimizer.name
        axis = f"parallel.tp is {tp}" if tp > 1 else f"parallel.pp is {pp}"
        shared, off = (f"zero.stage is {self.zero.stage}", "0") if self.zero.stage else (axis, "1")
        if pp > 1:
            self._check_pipeline()
        if not self.zero.stage and tp == pp == 1:
            return
        if self.optimizer.communicates:
            raise ValueError(f"{shared}, but optimizer.name {optimizer!r} communicates itself: set {off}")
        if self.communication.codec != "none":
            raise ValueError(
                f'{shared}, which does not take communication.codec {self.communication.codec!r}: set "none", or {off} there'
            )
        if tp > 1 and optimizer in ("lamb", "lars", "adafactor"):
            raise ValueError(
                f"parallel.tp is {tp}, but optimizer.name {optimizer!r} goes by sums over each layer, of which a rank has a "
                "part: set adamw, say, or parallel.tp to 1"
            )

    def _check_pipeline(self) -> None:
        pp, stages, layers = self.parallel.pp, self.parallel.num_stages, self.model.num_layers + 2
        if self.zero.stage > 1:
            raise ValueError(
                f"zero.stage is {self.zero.stage}, but parallel.pp is {pp}: gradients of a stage add up whole until its last "
                "micro-batch; set zero.stage to 1 or 0"
            )
        if stages > layers:
            raise ValueError(
                f"parallel.pp is {pp}, {stages} stages by schedule {self.parallel.schedule!r}, but the model has {layers} "
                f"layers (embedding, {self.model.num_layers} blocks, head); set model.num_layers to {stages - 2} or more, or "
                "fewer stages"
            )
        if self.train.compile:
            raise ValueError(f"train.compile is true, but parallel.pp is {pp}, whose stages are not compiled; set it to false")

    @property
    def folder(self) -> Path:
        """Where the run's outputs go."""
        return Path(self.train.folder) / self.name

    def check_ranks(self, num_ranks: int) -> None:
        """ConfigError unless `num_ranks` ranks can share the model and a batch, and micro-batches a rank's share of it."""
        batch, micro = self.train.batch, self.train.micro_batch
        try:
            num_ranks = self.parallel.copies(num_ranks)  # those that share a model see the same sequences
        except ValueError as error:
            raise ConfigError(f"parallel.{error}") from None
        if batch % num_ranks:
            near = max(num_ranks, round(batch / num_ranks) * num_ranks)
            raise ConfigError(
                f"train.batch is {batch} sequences, which {num_ranks} ranks can't share; set it to a multiple of "
                f"{num_ranks}, such as {near}"
            )
        share = batch // num_ranks
        if micro and share % micro:
            raise ConfigError(
                f"train.micro_batch is {micro}, which does not divide a rank's {share} sequences (train.batch "
                f"{batch} / {num_ranks} ranks); set it to a divisor of {share}, or to 0 for all at once"
            )
        try:
            self.parallel.cut(share, micro_batch=micro)
        except ValueError as error:
            raise ConfigError(f"parallel.{error}") from None


def load_config(path: Path | str, *, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file; each override is "section.key=value", the value as in TOML (quotes may be left out)."""
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"config {path} can't be read: {error.strerror}; name a TOML file, such as examples/gpt_small.toml"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is no TOML: {error}; correct it there") from None
    for override in overrides:
        _override(tree, override)
    return _build(Config, tree, prefix="")


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not all([*sections, last]):
        raise ConfigError(f"--set {override} is no assignment; write --set section.key=value, such as --set train.steps=10")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override}: {section} is a value, not a section; write --set {section}=value")
    try:
        tree[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        tree[last] = text


def _build(kind: type, tree: Mapping[str, Any], *, prefix: str) -> Any:
    """The dataclass `kind` from a TOML table; `prefix` leads the names of its keys in messages."""
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            fix = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(prefix + n for n in names)}"
            raise ConfigError(f"unknown key {prefix}{key} = {value!r}; {fix}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{key} is {value!r}; it is a section: write [{prefix}{key}] and its keys below")
            values[key] = _build(typing.cast(type, hints[key]), value, prefix=f"{prefix}{key}.")
        else:
            values[key] = _convert(value, hints[key], key=prefix + key)
    try:
        return kind(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from None


EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text in quotes"}


def _convert(value: Any, hint: Any, *, key: str) -> Any:
    """`value` as the field's type; an int will do for a float, nothing else is converted."""
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f'{key} is {value!r}; it must be a list of texts, such as [".py", ".md"]')
        return tuple(value)
    kinds = typing.get_args(hint) or (hint,)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) not in kinds or (hint is float and not math.isfinite(value)):
        raise ConfigError(f"{key} is {value!r}; it must be {' or '.join(EXPECTED[kind] for kind in kinds)}")
    return value
