"""A configuration for the ranks at hand: with [parallel] adapt they may be any number, and come and
go.

torchrun loses a node   all processes end, and are started again, fewer than before
adapted                 tp, pp and dp for these; whom there is no use for waits outside of the
                        process group
folder.continues        the run goes on from its newest checkpoint, without being told to
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from pyops.config import Config, ConfigError
from pyops.elastic.membership import Choice, Grid, Limits, choose
from pyops.mesh import alone
from pyops.models import GPT, GPTConfig
from pyops.precision import PRECISIONS
from pyops.train.setup.gpt_layers import layer_costs

__all__ = ["adapted", "limits_of", "plans", "started_ranks", "trouble_ahead"]

MOMENTS = {"sgd": 1, "lion": 1, "lars": 1, "adagrad": 1, "adafactor": 0}  # of others two


def started_ranks() -> int:
    """As torchrun, or whoever made the default group, says; 1 of a process on its own."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def adapted(config: Config, ranks: int, *, idle: bool = True) -> tuple[Config, Choice]:
    """`config` with a layout for `ranks` ranks, and what was chosen; as it is, without [parallel]
    adapt, where it fits.

    Args:
        idle: Whether ranks may be left out; the last ones are. Losses don't depend on the layout.

    Raises:
        ConfigError: Where there is none.
    """
    wanted = config.parallel
    if not wanted.adapt:
        config.check_ranks(ranks)
        grid = Grid(wanted.tp, wanted.pp, ranks // (wanted.tp * wanted.pp * wanted.cp))
        return config, Choice(grid, 0, "")
    limits = limits_of(config)
    try:
        choice = choose(ranks, wanted=Grid(wanted.tp, wanted.pp), limits=limits, idle=idle)
    except ValueError as error:
        raise ConfigError(f"parallel.adapt: {error}") from None
    grid, train, recompute = choice.grid, config.train, config.recompute
    parallel = replace(
        wanted,
        tp=grid.tp,
        pp=grid.pp,
        dp=grid.dp,
        adapt=False,
        memory_bytes=0,
        **_of_no_pipeline(grid),
    )
    if grid.pp == 1 < wanted.pp:  # what the pipeline kept small stays so
        share = config.train.batch // grid.dp
        if (
            wanted.num_microbatches
            and not train.micro_batch
            and share % wanted.num_microbatches == 0
        ):
            train = replace(train, micro_batch=share // wanted.num_microbatches)
        if wanted.recompute != "never" and not recompute.modules:
            recompute = replace(recompute, modules=("blocks.*",))
    found = replace(config, parallel=parallel, train=train, recompute=recompute)
    found.check_ranks(grid.ranks)
    return found, choice


def trouble_ahead() -> str:
    """What would go wrong when a node joins, and the fix; "" where nothing would. torchrun's agents
    then look for each other's address in a part of their store that only the first round has
    written to."""
    if (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        or os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    ):
        return ""
    return (
        "; a node that joins would wait for ever: start torchrun with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
    )


def plans(config: Config, ranks: int) -> Iterator[tuple[int, str]]:
    """For 1, 2, ..., `ranks` ranks: what [parallel] adapt would choose, and why, in words."""
    config = replace(config, parallel=replace(config.parallel, adapt=True))
    for number in range(1, ranks + 1):
        try:
            yield number, adapted(config, number)[1].reason
        except ConfigError as error:
            yield number, str(error)


def _of_no_pipeline(grid: Grid) -> dict[str, Any]:
    return {"num_microbatches": 0, "recompute": "never"} if grid.pp == 1 else {}


def limits_of(config: Config) -> Limits:
    """What the model and the other sections of `config` allow."""
    model: Any = getattr(config, config.task.section)
    parallel, text = config.parallel, isinstance(model, GPTConfig)
    whole = config.optimizer.communicates or config.communication.codec != "none"
    layers_whole = (
        whole
        or not text
        or config.elastic.on
        or config.optimizer.name in ("lamb", "lars", "adafactor")
    )
    memory: dict[str, Any] = {}
    if parallel.memory_bytes:
        if not text:
            raise ConfigError(
                f"parallel.memory_bytes is {parallel.memory_bytes}, which is for task.kind "
                "text alone; set it to 0"
            )
        memory = {
            "memory": float(parallel.memory_bytes),
            "parameters": _parameters(model),
            "each": _bytes_of_each(config),
        }
    return Limits(
        heads=model.num_heads,
        kv_heads=getattr(model, "num_kv_heads", 0),
        batch=config.train.batch,
        costs=layer_costs(model) if text else [0.0, *[1.0] * model.num_layers, 0.0],
        stages=parallel.num_stages // parallel.pp,
        folded=parallel.schedule == "zbv",
        micro_batch=config.train.micro_batch,
        micro_batches=parallel.num_microbatches,
        zero=config.zero.stage,
        most=(
            int(layers_whole),
            int(whole),
            parallel.dp,
        ),
        **memory,
    )


def _parameters(model: GPTConfig) -> list[int]:
    """Of the layers of the pipeline; what is tied counts in both."""
    with alone():  # ranks are joined when it is known how many of them have work
        layers = GPT(model, seed=None, device="meta").layers()
    return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]


def _bytes_of_each(config: Config) -> tuple[float, float, float]:
    """Of a parameter: its weight, its gradient, and what the optimizer keeps on the device."""
    precision = PRECISIONS[config.precision.dtype]
    width = float(precision.dtype.itemsize)
    states = 4.0 * (MOMENTS.get(config.optimizer.name, 2) + int(precision.master_weights))
    return width, width, 0.0 if config.zero.offload != "none" else states
