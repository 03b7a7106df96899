"""What a replica gives to a checkpoint and to a replica that joins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyops.local_sgd.config import LocalSGDConfig
from pyops.local_sgd.exchange import Exchange, Pending
from pyops.local_sgd.part import Part
from pyops.local_sgd.values import Value, write_back

__all__ = ["OnItsWay", "SavedReplica", "everything"]


@dataclass
class OnItsWay:
    """An exchange of a fragment that has begun.

    Attributes:
        fragment: Its number.
        due: The step at the end of which it is applied.
        means: A message of each part, which becomes the mean.
        pending: What is waited for; empty once all has arrived.
    """

    fragment: int
    due: int
    means: list[Tensor]
    pending: list[Pending]


def everything(model: nn.Module, values: Sequence[Value]) -> Iterable[Tensor]:
    """All tensors in which replicas are to begin alike: what is trained, masters, what is frozen,
    and buffers."""
    for value in values:
        yield value.tensor
        if value.copy is not None:
            yield value.copy
    yield from _untrained(model)


def _untrained(model: nn.Module) -> Iterable[Tensor]:
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.numel():
            yield parameter.detach()
    yield from model.buffers()


class SavedReplica:
    """The part of a LocalSGD that states go through."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    config: LocalSGDConfig
    exchange: Exchange
    fragments: list[list[Part]]
    steps: int
    rounds: int
    skipped: int
    _joined: bool
    _failed: list[int]
    _on_its_way: list[OnItsWay]

    def _values_of(self, fragment: int) -> list[list[Value]]:
        raise NotImplementedError

    @property
    def _parts(self) -> list[Part]:
        return [part for parts in self.fragments for part in parts]

    @torch.no_grad()
    def _take_global(self, *, source: int, behind: bool) -> None:
        """Bring the global state of the replica `source` to all. A collective.

        Args:
            source: Of the replicas' exchange.
            behind: Whether this replica takes the global values as its own, too.
        """
        exchange = self.exchange
        for fragment, parts in enumerate(self.fragments):
            for part, values in zip(parts, self._values_of(fragment), strict=True):
                exchange.broadcast([part.weights], source=source)
                if exchange.gather(part.momentum is not None)[source]:
                    if part.momentum is None:
                        part.set_momentum(torch.zeros_like(part.weights))
                    assert part.momentum is not None
                    exchange.broadcast([part.momentum], source=source)
                else:
                    part.set_momentum(None)
                part.carry_memory(exchange, None if behind else part.memory_state())
                if behind:
                    part.give(values)
        for tensor in _untrained(self.model):
            arrived = tensor.clone()
            exchange.broadcast([arrived], source=source)
            if behind:
                tensor.copy_(arrived)
        write_back(self.optimizer)

    def _identity(self) -> dict[str, Any]:
        codec = self.config.wire_codec
        return {
            "method": self.config.method,
            "fragments": self.config.fragments,
            "codec": codec.name if codec else "none",
        }

    def state_dict(self) -> dict[str, Any]:
        """The outer state of this replica: global values and momenta by parameter, counts, what
        codecs left out, and means that have arrived but are not applied yet.

        Save it beside the model's and the optimizer's states of this same replica. It shares memory
        with what is in use, and waits for exchanges that are on their way.
        """
        for arriving in self._on_its_way:
            for pending in arriving.pending:
                pending.wait()
            arriving.pending = []
        weights: dict[str, Tensor] = {}
        momentum: dict[str, Tensor] = {}
        for part in self._parts:
            weights |= zip(part.layout.names, part.views(part.weights), strict=True)
            if part.momentum is not None:
                momentum |= zip(part.layout.names, part.views(part.momentum), strict=True)
        return {
            **self._identity(),
            "steps": self.steps,
            "rounds": self.rounds,
            "skipped": self.skipped,
            "global": weights,
            "momentum": momentum,
            "left_out": [[part.memory_state() for part in parts] for parts in self.fragments],
            "arrived": [
                {"fragment": each.fragment, "due": each.due, "means": list(each.means)}
                for each in self._on_its_way
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, at the same number of replicas bit for bit, or at
        another: a replica without a state of its own takes that of any other.

        Raises:
            ValueError: On every replica and before anything is changed, for the state of another
                model, method, codec or number of fragments.
        """
        error: Exception | None = None
        try:
            self._check_state(state)
        except Exception as caught:
            error = caught
        self.exchange.agree(error)
        self.steps, self.rounds = int(state["steps"]), int(state["rounds"])
        self.skipped, self._joined, self._failed = int(state["skipped"]), True, []
        for parts, left_out in zip(self.fragments, state["left_out"], strict=True):
            for part, left in zip(parts, left_out, strict=True):
                part.take_named(state["global"])
                part.set_momentum(part.flat_of(state["momentum"]))
                part.carry_memory(self.exchange, left)
        self._on_its_way = [
            OnItsWay(
                int(each["fragment"]),
                int(each["due"]),
                [mean.detach().clone() for mean in each["means"]],
                [],
            )
            for each in state["arrived"]
        ]

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """ValueError for what is no state of this model and configuration."""
        if not isinstance(state, Mapping) or "global" not in state:
            raise ValueError(
                f"LocalSGD: this is no outer state but a {type(state).__name__}; pass what "
                "state_dict() gave"
            )
        for key, ours in self._identity().items():
            if state.get(key) != ours:
                raise ValueError(
                    f"LocalSGD: the state was saved with {key} {state.get(key)!r}, and this run "
                    f"has {ours!r}; use the same"
                )
        for part in self._parts:
            for name, shape in zip(part.layout.names, part.layout.shapes, strict=True):
                found = state["global"].get(name)
                if found is None or tuple(found.shape) != tuple(shape):
                    there = "is not there" if found is None else f"has shape {tuple(found.shape)}"
                    raise ValueError(
                        f"LocalSGD: {name} {there} in the state, and has shape {tuple(shape)} "
                        "here; load the state of the same model"
                    )
