"""Whether a model's weights fit into the memory of the machine, before any is taken.

weights of a rank        =  all / (tp * pp), with zero.stage 3 also / dp
a host's ranks together  <=  its memory
"""

from __future__ import annotations

import os

import torch

from pyops.config import Config, ConfigError
from pyops.host_memory import total_memory
from pyops.models.config_checks import estimated_elements, largest_field
from pyops.precision import PRECISIONS

__all__ = ["check_memory"]


def check_memory(config: Config, *, ranks: int) -> None:
    """ConfigError naming the largest size, where the weights alone take more than there is: on all
    ranks of such a host."""
    if config.model_folder.given:  # whose parameters are read part by part
        return
    section = config.task.section
    model = getattr(config, section)
    shared = ranks if config.zero.stage == 3 else config.parallel.tp * config.parallel.pp
    taken = (
        estimated_elements(model)
        * PRECISIONS[config.precision.dtype].dtype.itemsize
        // max(1, shared)
    )
    on_cuda = config.train.device == "cuda" or (
        config.train.device == "auto" and torch.cuda.is_available()
    )
    if on_cuda and torch.cuda.is_available():
        there, where = torch.cuda.get_device_properties(0).total_memory, "its device"
    else:
        try:
            there, where = total_memory(), "this host"  # or its container
        except OSError:  # a system without /proc
            there, where = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this host"
        taken *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if taken > there:
        field = largest_field(model)
        raise ConfigError(
            f"{section}.{field} is {getattr(model, field)}; the weights would take some "
            f"{taken / 2**30:.4g} GiB, {where} has "
            f"{there / 2**30:.4g}: make the model smaller, or share it with parallel.tp, "
            "parallel.pp or zero.stage 3"
        )
