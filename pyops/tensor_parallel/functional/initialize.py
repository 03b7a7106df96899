"""Parameters drawn by (seed, name, place in the whole): the ranks' parts put together are bitwise
the tensor of one rank.

No rank builds the whole: each draws the elements that its Placement gives it, and its padding is
zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pyops import random
from pyops.flat import Placement

__all__ = ["initialize_", "initialize_model_"]


@torch.no_grad()
def initialize_(
    parameter: Tensor,
    *,
    seed: int,
    name: str,
    std: float = 0.02,
    mean: float = 0.0,
    placement: Placement | None = None,
) -> Tensor:
    """Fills `parameter` in place with normal numbers of the stream (seed, name). They are drawn in
    fp32 and cast, so that every dtype starts from the same ones.

    Args:
        parameter: this rank's part; its padding becomes zero.
        seed: of the stream.
        name: of the stream.
        std: standard deviation; 0 fills it with the mean.
        mean: of the numbers.
        placement: where the part lies in the whole parameter; None: it is the whole.

    Returns:
        The parameter.
    """
    where = placement or Placement.whole(parameter.shape, rank=0, ranks=1)
    part = where.part(parameter)
    if part.numel() < parameter.numel():
        parameter.zero_()
    if std == 0.0:
        part.fill_(mean)
    else:
        values = random.normal(
            seed,
            name,
            where.size,
            std=std,
            offset=where.offset,
            global_shape=where.global_shape,
            device=parameter.device,
        )
        part.copy_(values.add_(mean) if mean else values)
    return parameter


def initialize_model_(
    model: nn.Module,
    *,
    seed: int,
    std: float | Callable[[str], float] = 0.02,
    prefix: str = "",
    only: nn.Module | None = None,
) -> None:
    """Fills every parameter by its qualified name: biases with 0, one-dimensional weights (of
    norms) with 1, the others with normal numbers. A parameter of two names is drawn by its first.

    Args:
        model: its modules' placements say which part of a parameter this rank has.
        seed: of all streams.
        std: standard deviation, or a function of the name that gives one.
        prefix: put before the names, for a part of a larger model.
        only: a module of the model; only its own parameters are drawn, not its children's.
    """
    wanted = None if only is None else {id(p) for p in only.parameters(recurse=False)}
    if wanted == set():
        return
    placements = Placement.of(model)
    for name, parameter in model.named_parameters():
        if wanted is not None and id(parameter) not in wanted:
            continue
        last = name.rpartition(".")[2]
        spread, mean = (std(name) if callable(std) else std), 0.0
        if "bias" in last:
            spread = 0.0
        elif parameter.dim() == 1:
            spread, mean = 0.0, 1.0
        initialize_(
            parameter,
            seed=seed,
            name=prefix + name,
            std=spread,
            mean=mean,
            placement=placements.get(name),
        )
