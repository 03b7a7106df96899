"""What a rank does in bench diloco: a short run of the example GPT as a replica that meets the
others now and then.

Runs within `slow_link.Link.run`, with the trainer of bench slow_link.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from benchmarks.links.slow_link_ranks import BASELINE, CONFIG, Pair, torch_adamw
from benchmarks.links.slow_link_ranks import WAYS as GRADIENTS
from benchmarks.links.slow_link_ranks import losses as losses_of
from pyops.config import Config, load_config
from pyops.local_sgd import LocalSGD, LocalSGDConfig

__all__ = ["BASELINE", "WAYS", "losses"]


class MeetingOptimizer:
    """An optimizer of one replica, whose step brings the replicas together where it is time."""

    def __init__(self, inner: Any, outer: LocalSGD) -> None:
        self._inner, self._outer = inner, outer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the replica's own optimizer."""
        groups: list[dict[str, Any]] = self._inner.param_groups
        return groups

    def step(self) -> None:
        """A step of the replica, and a meeting where one is due."""
        self._inner.step()
        self._outer.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """As of the replica's own optimizer."""
        self._inner.zero_grad(set_to_none=set_to_none)


def _replica(model: nn.Module, config: Config, *, warmup: int, options: LocalSGDConfig) -> Pair:
    inner = torch_adamw(model, config)
    return model, MeetingOptimizer(inner, LocalSGD(model, inner, options))


def _diloco(**options: Any) -> Callable[..., Pair]:
    return partial(_replica, options=LocalSGDConfig(method="diloco", **options))


AVERAGED = partial(_replica, options=LocalSGDConfig(method="local_sgd", every=8, states="average"))
WAYS: dict[str, Callable[..., Pair]] = {
    BASELINE: GRADIENTS[BASELINE],
    "local SGD, every 8": partial(_replica, options=LocalSGDConfig(method="local_sgd", every=8)),
    "local SGD, every 16": partial(_replica, options=LocalSGDConfig(method="local_sgd", every=16)),
    "local SGD, every 8, states averaged": AVERAGED,
    "local SGD, every 8, states averaged, learning rate x sqrt 2": AVERAGED,
    "local SGD, every 8 after 500 steps, states averaged": partial(
        _replica,
        options=LocalSGDConfig(method="local_sgd", every=8, after=500, states="average"),
    ),
    "DiLoCo, every 25": _diloco(every=25),
    "DiLoCo, every 50": _diloco(every=50),
    "DiLoCo, every 50, outer momentum 0.7": _diloco(every=50, outer_momentum=0.7),
    "DiLoCo, every 50, outer momentum 0.5": _diloco(every=50, outer_momentum=0.5),
    "DiLoCo, every 50 after 500 steps, outer momentum 0.5": _diloco(
        every=50, after=500, outer_momentum=0.5
    ),
    "DiLoCo, every 50, int8": _diloco(every=50, codec="int8"),
    "DiLoCo, every 50, int4": _diloco(every=50, codec="int4"),
    "DiLoCo, every 50, one bit": _diloco(every=50, codec="onebit"),
    "DiLoCo, every 50, 2 fragments, int8": _diloco(every=50, fragments=2, delay=5, codec="int8"),
}

# A replica's batch is half of that of both, so that the noise of its gradients, by which Adam
# divides, is sqrt 2 times as large (Malladi et al., arXiv:2205.10287).
RATE_FACTORS = {"local SGD, every 8, states averaged, learning rate x sqrt 2": math.sqrt(2)}


def losses(*, way: str, batch: int, num_steps: int) -> dict[str, Any]:
    """As `links.slow_link_ranks.losses`, of a way of this bench."""
    return losses_of(
        way=way,
        batch=batch,
        num_steps=num_steps,
        warmup=0,
        make=WAYS[way],
        rate=RATE_FACTORS.get(way, 1.0) * load_config(CONFIG).optimizer.lr,
    )
