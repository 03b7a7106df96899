"""Data parallelism and the optimizer, as a configuration says.

adamw, sgd, lamb, ...          DataParallel reduces gradients (through [communication] codec, if
                               any) -> optimizer
onebit_adam     warm-up: the same; then DataParallel is silent, and the optimizer communicates
                momenta (zero_one_adam: always)
[zero], [parallel] tp, pp     `pyops.parallel.parallelize` shares out the model and the states
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pyops.optim
from pyops import recompute
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.names import parse
from pyops.config import (
    CommunicationConfig,
    Config,
    ConfigError,
    OptimizerConfig,
    RecomputeConfig,
)
from pyops.context_parallel import ContextRanks
from pyops.data_parallel import DataParallel
from pyops.flat import Placement
from pyops.mesh import Axes, Mesh, ProcessGroupLike
from pyops.models import GPT
from pyops.onebit import OneBitConfig, OneBitLAMBConfig, ZeroOneConfig
from pyops.parallel.stages.block_lists import compile_blocks
from pyops.precision import PRECISIONS
from pyops.tensor_parallel.grids import Grid

__all__ = [
    "is_planned",
    "make_data_parallel",
    "make_mesh",
    "make_model",
    "make_named_optimizer",
    "make_optimizer",
    "num_parameters",
    "on_grid",
    "optimizer_maker",
    "recompute_modules",
]

CLASSES = {
    "adamw": "AdamW",
    "adam": "Adam",
    "sgd": "SGD",
    "lion": "Lion",
    "lamb": "LAMB",
    "lars": "LARS",
    "adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "onebit_adam": "OneBitAdam",
    "onebit_lamb": "OneBitLAMB",
    "zero_one_adam": "ZeroOneAdam",
}
ONE_BIT_CONFIGS: dict[str, type[OneBitConfig | OneBitLAMBConfig | ZeroOneConfig]] = {
    "onebit_adam": OneBitConfig,
    "onebit_lamb": OneBitLAMBConfig,
    "zero_one_adam": ZeroOneConfig,
}
WITH_BETAS = ("adamw", "adam", "lion", "lamb", "onebit_adam", "onebit_lamb", "zero_one_adam")
WITH_EPS = ("adamw", "adam", "lamb", "adagrad", "onebit_adam", "onebit_lamb", "zero_one_adam")
WITH_MOMENTUM = ("sgd", "lars")


def _weight_decay_group(name: str, parameter: nn.Parameter) -> str:
    return "decayed" if parameter.ndim >= 2 else "not decayed"


def _depth(name: str, num_blocks: int) -> int:
    """The number of the layer of which this parameter is: 0 the embedding, then the blocks, then
    the head."""
    layer, *rest = name.split(".")
    return (
        {"embedding": 0, "stem": 0, "head": num_blocks + 1}[layer]
        if layer != "blocks"
        else 1 + int(rest[0])
    )


def _codec(config: CommunicationConfig) -> Codec | None:
    return None if config.codec == "none" else parse(config.codec)


def make_mesh(config: Config, *, device_type: str) -> Mesh:
    """The axes of [parallel] over the ranks that run. A collective."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    parallel = config.parallel
    axes = Axes(pp=parallel.pp, dp=parallel.copies(num_ranks), cp=parallel.cp, tp=parallel.tp)
    return Mesh(axes, device_type=device_type)


def is_planned(config: Config) -> bool:
    """Whether the ranks share more than the batch, so that `pyops.parallel` composes the run."""
    parallel = config.parallel
    return bool(config.zero.stage) or max(parallel.tp, parallel.pp, parallel.cp) > 1


def make_model(config: Config, mesh: Mesh, *, device: torch.device) -> GPT:
    """The model with its first values; its layers are shared by the ranks of the axis "tp", and the
    tokens of its rows by those of "cp".

    Where `is_planned`, it is on the meta device: `pyops.parallel.parallelize` gives it memory and
    values part by part, recomputes what [recompute] names, and compiles its blocks.

    Raises:
        ConfigError: The ranks can't share the heads; or [recompute] names no module.
    """
    later, grid = is_planned(config), config.parallel.grid
    try:
        model = GPT(
            config.model,
            group=mesh if grid == "1d" else Grid.of(mesh, mode=grid),
            sequence_parallel=config.parallel.sequence_parallel,
            context=ContextRanks.of(mesh, method=config.parallel.cp_method),
            order=config.parallel.cp_order,
            seed=None if later else config.train.seed,
            device="meta" if later else device,
            dtype=PRECISIONS[config.precision.dtype].dtype,
        )
    except ValueError as error:
        raise ConfigError(f"parallel.tp is {config.parallel.tp}: {error}") from None
    if config.recompute.modules and not later:
        recompute_modules(model, config.recompute)
    if config.train.compile and not later:
        compile_blocks(model.blocks)
    return model


def on_grid(
    config: Config, make: Callable[..., nn.Module], *, device_type: str, **where: Any
) -> nn.Module:
    """A model whose layers the ranks of [parallel] grid share, without values. A collective.

    Args:
        config: The run's configuration.
        make: Makes it, of a group.
        device_type: Of the ranks' devices.
        where: Device and dtype of the parameters.

    Raises:
        ConfigError: The ranks can't share the heads.
    """
    parallel = config.parallel
    mesh = make_mesh(config, device_type=device_type)
    try:
        return make(seed=None, group=Grid.of(mesh, mode=parallel.grid), **where)
    except ValueError as error:
        raise ConfigError(f"parallel.tp is {parallel.tp}: {error}") from None


def num_parameters(model: nn.Module) -> int:
    """Elements of the parameters of the whole model, of which a rank may hold parts."""
    placements = Placement.of(model)
    return sum(
        math.prod(placements[name].global_shape if name in placements else parameter.shape)
        for name, parameter in model.named_parameters()
    )


def make_data_parallel(
    config: Config, model: nn.Module, *, group: ProcessGroupLike
) -> DataParallel:
    """`model` over the ranks of `group`; gradients are summed."""
    options = config.train
    codec = None if config.optimizer.communicates else _codec(config.communication)
    return DataParallel(
        model,
        group=group,
        reduction="sum",
        algorithm=options.algorithm,
        bucket_bytes=options.bucket_bytes,
        group_by=_weight_decay_group,
        codec=codec,
    )


def make_optimizer(
    config: Config, parallel: DataParallel, *, group: dist.ProcessGroup | None
) -> Any:
    """The optimizer of `parallel`'s flat buffers: a torch.optim.Optimizer with `grad_norm`."""
    options = config.optimizer
    groups = [
        {
            "params": [buffer.parameter],
            "weight_decay": options.weight_decay if key == "decayed" else 0.0,
        }
        for key, buffer in zip(parallel.keys, parallel.flat, strict=True)
    ]
    arguments = _arguments(options)
    arguments |= {"max_grad_norm": _max_grad_norm(options), "zero_grad": True}
    arguments["master_weights"] = PRECISIONS[config.precision.dtype].master_weights
    if options.communicates:
        arguments["config"] = ONE_BIT_CONFIGS[options.name](
            warmup_steps=options.compression_warmup_steps,
            group=group,
            model=parallel,
            reduction="sum",
            codec=_codec(config.communication),
            total_steps=config.train.num_steps,
        )
    return _class(options)(groups, **arguments)


def recompute_modules(model: nn.Module, options: RecomputeConfig) -> None:
    """Let the chosen modules of `model` keep their inputs alone.

    Raises:
        ConfigError: For names that no module has.
    """
    try:
        recompute.apply(
            model, options.modules, offload=None if options.offload == "none" else options.offload
        )
    except ValueError as error:
        raise ConfigError(f"recompute.modules: {error}") from None


def make_named_optimizer(
    config: Config, named: Sequence[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """The optimizer of these parameters alone, by their names in the model; with groups for each
    layer where its learning rate is its own (`layer_decay`). The caller clips their gradients, and
    zeroes them."""
    options = config.optimizer
    keyed: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        rate = options.lr * options.layer_decay ** (
            config.num_blocks + 1 - _depth(name, config.num_blocks)
        )
        keyed.setdefault((_weight_decay_group(name, parameter), rate), []).append(parameter)
    groups = [
        {
            "params": some,
            "weight_decay": options.weight_decay if key == "decayed" else 0.0,
            "lr": rate,
        }
        for (key, rate), some in keyed.items()
    ]
    arguments = {
        **_arguments(options),
        "master_weights": PRECISIONS[config.precision.dtype].master_weights,
    }
    made: torch.optim.Optimizer = _class(options)(groups, **arguments)
    return made


def optimizer_maker(options: OptimizerConfig) -> Callable[..., torch.optim.Optimizer]:
    """Makes the optimizer of [optimizer], given parameters or groups of them."""
    return partial(_class(options), weight_decay=options.weight_decay, **_arguments(options))


def _class(options: OptimizerConfig) -> Any:
    return getattr(pyops.optim, CLASSES[options.name])


def _max_grad_norm(options: OptimizerConfig) -> float:
    """A limit of infinity never clips, but the norm is still taken, which finds gradients that are
    not finite."""
    return options.max_grad_norm or float("inf")


def _arguments(options: OptimizerConfig) -> dict[str, Any]:
    """Hyper-parameters that every such optimizer has."""
    found: dict[str, Any] = {"lr": options.lr}
    if options.name in WITH_BETAS:
        found["betas"] = (options.beta1, options.beta2)
    if options.name in WITH_EPS:
        found["eps"] = options.eps
    if options.name in WITH_MOMENTUM:
        found["momentum"] = options.momentum
    return found
