"""Lottery tickets: a sparse network that learns from its first values (Frankle and Carbin, 2019).

    draw theta_0; train k steps -> theta_k                       k = rewind
    each round   train to the end from mask * theta_k
                 mask <- the (1 - rate) largest of what survives
                 weights <- mask * theta_k; optimizer, schedule and data begin anew at step k
    control      the same mask, with another draw of theta_0

A round is a whole training. theta_k is a checkpoint; what the optimizer knew is not taken over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops import checkpoint
from pyops.given_numbers import check_number, check_whole
from pyops.pruning.masks import Mask, Masks
from pyops.pruning.ranking.holdings import Holdings
from pyops.pruning.ranking.rule import Rule, masks_of_holdings, scores_of
from pyops.pruning.ranking.structures import Structure

__all__ = ["LotteryConfig", "Ticket", "lottery", "rate_of"]


class Train(Protocol):
    """Trains a model in place, from step `first` to step `last`."""

    def __call__(
        self, model: nn.Module, masks: Masks | None, *, first: int, last: int | None
    ) -> None:
        """Make an optimizer, `hold` the masks by it, and take the steps; the data of a step depend
        on its number alone. last=None: to the end."""


@dataclass(frozen=True)
class LotteryConfig:
    """How a lottery is played.

    Raises:
        ValueError: For numbers that make no sense.
    """

    rounds: int
    """How many times weights are taken away."""
    rate: float = 0.2
    """The share of what survives that each round takes away; see `rate_of`."""
    rewind: int = 0
    """The step whose weights each round begins with, k; 0: the first values."""
    scope: str | Structure = "layer"
    """As of `magnitude`."""
    only: Sequence[str] | None = None
    """As of `magnitude`."""
    least: float = 0.0
    """As of `magnitude`."""
    folder: str | Path | None = None
    """Where the weights of step k are saved; None: in host memory."""

    def __post_init__(self) -> None:
        check_whole("rounds", self.rounds, least=1)
        check_whole("rewind", self.rewind)
        check_number("rate", self.rate, lambda v: 0 < v < 1, "give a share between 0 and 1")
        Rule(self.scope, self.only, self.least).check(self.rate)

    def sparsity(self, number: int) -> float:
        """After so many rounds: 1 - (1 - rate)^number."""
        return float(1.0 - (1.0 - self.rate) ** number)


def rate_of(sparsity: float, rounds: int) -> float:
    """The rate of each round that leaves a sparsity of P after n of them: 1 - (1 - P)^(1 / n).

    The paper prints P^(1 / n).
    """
    check_whole("rounds", rounds, least=1)
    check_number("sparsity", sparsity, lambda v: 0 <= v < 1, "give a share from 0 to below 1")
    return float(1.0 - (1.0 - sparsity) ** (1.0 / rounds))


@dataclass(frozen=True)
class Ticket:
    """A round's outcome.

    Attributes:
        round: From 1.
        sparsity: The share of the chosen parameters that is gone.
        model: Trained; the next round trains it further from theta_k, so evaluate it now.
        masks: Its masks, {name: Mask}.
    """

    round: int
    sparsity: float
    model: nn.Module
    masks: Mapping[str, Mask]
    _game: _Game = field(repr=False)

    def control(self, seed: int) -> nn.Module:
        """A model of another draw, trained under the same masks from the same step. Collective.

        Args:
            seed: Of the draw; another than the lottery's, 0.
        """
        if seed == 0:
            raise ValueError("seed 0 is the ticket's own draw; give another for the control")
        return self._game.control(self.masks, seed)


class _Game:
    def __init__(
        self,
        make: Callable[[int], nn.Module],
        train: Train,
        config: LotteryConfig,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.make, self.train, self.config, self.group = make, train, config, group
        self.rule = Rule(config.scope, config.only, config.least)

    def start(self, seed: int) -> nn.Module:
        """A model of this draw, after `rewind` steps."""
        model = self.make(seed)
        if self.config.rewind:
            self.train(model, None, first=0, last=self.config.rewind)
        return model

    def save(self, model: nn.Module) -> Mapping[str, Any]:
        """What a round begins with, as `rewound` takes it."""
        state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        if self.config.folder is None:
            return state
        checkpoint.save(self.config.folder, {}, own={"model": state}, group=self.group)
        return {}

    def rewind(self, model: nn.Module, saved: Mapping[str, Any]) -> None:
        """Give the model the weights of step k."""
        if self.config.folder is not None:
            saved = checkpoint.load(self.config.folder, group=self.group)[1]["model"]
        model.load_state_dict(saved)

    @torch.no_grad()
    def choose(
        self, model: nn.Module, before: Mapping[str, Mask] | None, number: int
    ) -> dict[str, Mask]:
        """The masks of the next round, among what survived."""
        holdings = Holdings(model, only=self.config.only, group=self.group)
        within: dict[str, Tensor] | None = None
        if before is not None:
            within = {e.name: before[e.name].alive().view(-1) for e in holdings}
        alive = self.rule.select(
            holdings, scores_of(holdings, None), self.config.sparsity(number), within=within
        )
        return masks_of_holdings(holdings, alive)

    def control(self, masks: Mapping[str, Mask], seed: int) -> nn.Module:
        model = self.start(seed)
        self.play(model, masks)
        return model

    def play(self, model: nn.Module, masks: Mapping[str, Mask] | None) -> None:
        """Train from step k to the end."""
        held = None if masks is None else Masks(model, masks)
        self.train(model, held, first=self.config.rewind, last=None)
        if held is not None:
            held.release()


def lottery(
    make: Callable[[int], nn.Module],
    train: Train,
    config: LotteryConfig,
    *,
    group: dist.ProcessGroup | None = None,
) -> Iterator[Ticket]:
    """Play: a ticket after each round, from the densest on. Collective.

    Args:
        make: seed -> a model of first values of this seed; the lottery's is 0.
        train: (model, masks, first=, last=): takes steps `first` to `last` (None: the end) with an
            optimizer of its own, made anew, that `hold` binds to the masks (None: dense). The data
            and the rate of a step must depend on its number alone, so that each round repeats
            them.
        config: See `LotteryConfig`.
        group: The ranks that have the model together; see `pyops.mesh.resolve`.

    Raises:
        TypeError: For a `train` that can't be told where to begin and end, and so can't repeat its
            data.
    """
    try:
        inspect.signature(train).bind(None, None, first=0, last=None)
    except TypeError as error:
        raise TypeError(
            f"train{inspect.signature(train)} can't be called as train(model, masks, first=0, "
            f"last=None) ({error}): a lottery repeats the same data from step `first` on in every "
            "round; take both and order the data by the step's number"
        ) from None
    return _tickets(_Game(make, train, config, group))


def _tickets(game: _Game) -> Iterator[Ticket]:
    model = game.start(0)
    saved = game.save(model)
    game.play(model, None)
    masks: dict[str, Mask] | None = None
    for number in range(1, game.config.rounds + 1):
        masks = game.choose(model, masks, number)
        game.rewind(model, saved)
        game.play(model, masks)
        yield Ticket(number, game.config.sparsity(number), model, masks, game)
