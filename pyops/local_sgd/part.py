"""A part of a fragment: its tensors of one dtype and device, as one flat vector that all replicas
share, and what each has of it.

    global    w            the same bits at every replica
    momentum  v            of the outer SGD, likewise
    message   w - x        what this replica moved since; its mean D is the outer gradient
    local     x            what the inner optimizer steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.flat import FlatLayout
from pyops.local_sgd.config import LocalSGDConfig
from pyops.local_sgd.exchange import Exchange, Pending
from pyops.local_sgd.values import Value
from pyops.optim import SGD

__all__ = ["EASGD_BETA", "Part", "working_dtype"]

EASGD_BETA = 0.9  # the paper's beta = replicas * alpha (Zhang et al., section 5)


def working_dtype(tensor: Tensor) -> torch.dtype:
    """In which differences and means of such tensors are taken: fp32, or fp64 where it is that."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class Part:
    """The global vector of some tensors, and its exchange.

    Args:
        values: Of this replica, whose present numbers are the first global ones.
        config: What is done with the means.
        label: For messages.

    Attributes:
        weights: Flat, of the working dtype; zero between the tensors.
        momentum: The outer momentum, or None.
        memory: What the codec left out so far, or None.
    """

    def __init__(self, values: Sequence[Value], *, config: LocalSGDConfig, label: str) -> None:
        self.layout = FlatLayout.plan([(v.name, v.tensor.shape) for v in values])
        self.config, self.label = config, label
        like = values[0].tensor
        flat = torch.zeros(self.layout.numel, dtype=working_dtype(like), device=like.device)
        self.weights = nn.Parameter(flat, requires_grad=True)
        self.memory: ErrorFeedback | None = None
        self._before: tuple[Tensor, Tensor] | None = None  # errors ahead of the exchange that runs
        self._codec = config.wire_codec
        self._outer: torch.optim.Optimizer | None = None
        if config.method == "diloco" and not config.averages:
            fused = self.weights.dtype == torch.float32
            self._outer = (SGD if fused else torch.optim.SGD)(
                [self.weights],
                lr=config.outer_lr,
                momentum=config.outer_momentum,
                nesterov=config.outer_momentum > 0,
            )
        self.take(values)

    # --- vectors

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors within a flat vector."""
        flat = flat.detach()
        return [
            flat[self.layout.slice_at(index)].view(shape)
            for index, shape in enumerate(self.layout.shapes)
        ]

    @torch.no_grad()
    def take(self, values: Sequence[Value]) -> None:
        """Make the replica's present numbers the global ones."""
        for view, value in zip(self.views(self.weights), values, strict=True):
            view.copy_(value.tensor)

    def give(self, values: Sequence[Value]) -> None:
        """Make the global numbers those of the replica."""
        for view, value in zip(self.views(self.weights), values, strict=True):
            value.write(view)

    @torch.no_grad()
    def take_named(self, tensors: Mapping[str, Tensor]) -> None:
        """Make these tensors, by name, the global ones."""
        for name, view in zip(self.layout.names, self.views(self.weights), strict=True):
            view.copy_(tensors[name])

    @torch.no_grad()
    def flat_of(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """A flat vector of these tensors, by name; None where they are not there."""
        if self.layout.names[0] not in tensors:
            return None
        flat = torch.zeros_like(self.weights)
        for name, view in zip(self.layout.names, self.views(flat), strict=True):
            view.copy_(tensors[name])
        return flat

    @property
    def momentum(self) -> Tensor | None:
        if self._outer is None:
            return None
        found: Tensor | None = self._outer.state.get(self.weights, {}).get("momentum_buffer")
        return found

    @torch.no_grad()
    def set_momentum(self, momentum: Tensor | None) -> None:
        """Take up an outer momentum; None: that of the beginning."""
        if self._outer is None or not self.config.outer_momentum:
            return
        if momentum is None:
            self._outer.state.clear()
            return
        if self.momentum is None:  # a step along nothing makes the buffer
            before = self.weights.detach().clone()
            self._step(torch.zeros_like(before))
            self.weights.copy_(before)
        assert self.momentum is not None
        self.momentum.copy_(momentum)

    # --- an exchange

    @property
    def sends_values(self) -> bool:
        """Whether replicas send their values rather than what they moved: for a plain mean without
        a codec, which then has no rounding but its own."""
        return self.config.averages and self._codec is None

    @torch.no_grad()
    def message(self, values: Sequence[Value], *, weight: float = 1.0) -> Tensor:
        """What this replica sends, in memory of its own.

        Args:
            values: Its present numbers.
            weight: A factor; 0 of a replica that has nothing to say.
        """
        flat = torch.zeros_like(self.weights)
        pairs = zip(self.views(self.weights), self.views(flat), values, strict=True)
        for ours, out, value in pairs:
            out.copy_(value.tensor)
            if not self.sends_values:
                torch.sub(ours, out, out=out)
        if weight != 1.0:
            flat.mul_(weight)
        return flat

    def begin(self, flat: Tensor, exchange: Exchange) -> Pending:
        """Send a message; it becomes the mean."""
        if self._codec is not None and self._codec.feedback and self.memory is None:
            self.memory = self._new_memory(exchange)
        if (memory := self.memory) is not None:
            self._before = (memory.worker.clone(), memory.server.clone())
        return exchange.begin_mean(flat, codec=self._codec, error=self.memory, label=self.label)

    @torch.no_grad()
    def take_back(self) -> None:
        """After an exchange that is not applied: what the codec left out before is still to be
        sent."""
        if self.memory is None or self._before is None:
            return
        worker, server = self._before
        self.memory.worker.copy_(worker)
        self.memory.server.copy_(server)
        self.memory.overflowed.zero_()
        self._before = None

    @torch.no_grad()
    def apply(
        self, mean: Tensor, values: Sequence[Value], *, replicas: int, outer: bool = True
    ) -> None:
        """Take up a mean, in the global vector and in this replica.

        Args:
            mean: What `begin` made of the message.
            values: The replica's present numbers.
            replicas: How many the mean is of.
            outer: Whether "diloco" takes a step of its outer optimizer; else the mean as it is.
        """
        self._before = None
        if self.config.method == "easgd":
            self._attract(mean, values, replicas=replicas)
            return
        if self.sends_values:
            self.weights.copy_(mean)
        elif self._outer is None or not outer:
            self.weights.sub_(mean)
        else:
            self._step(mean)
        keep = self.config.keep_local
        for ours, value in zip(self.views(self.weights), values, strict=True):
            value.write(ours if keep == 0 else torch.lerp(ours, value.tensor.to(ours.dtype), keep))

    def _attract(self, mean: Tensor, values: Sequence[Value], *, replicas: int) -> None:
        alpha = self.config.alpha or EASGD_BETA / replicas
        for ours, value in zip(self.views(self.weights), values, strict=True):
            value.write(torch.lerp(value.tensor.to(ours.dtype), ours, alpha))
        self.weights.sub_(mean, alpha=alpha * replicas)

    def _step(self, gradient: Tensor) -> None:
        assert self._outer is not None
        self.weights.grad = gradient
        self._outer.step()
        self.weights.grad = None

    # --- what a codec left out

    def _new_memory(self, exchange: Exchange) -> ErrorFeedback:
        assert self._codec is not None
        return ErrorFeedback(
            self.layout,
            codec=self._codec,
            rank=exchange.rank,
            size=exchange.size,
            device=self.weights.device,
        )

    @torch.no_grad()
    def carry_memory(self, exchange: Exchange, old: dict[str, Any] | None) -> None:
        """Take up what a codec left out among other replicas: this replica's own part, and the part
        of the mean that it wrote for all.

        Args:
            exchange: Of the replicas from now on.
            old: What `memory_state` gave; None: nothing was left out.
        """
        if self._codec is None or not self._codec.feedback or old is None:
            self.memory = None
            return
        memory = self._new_memory(exchange)
        memory.rounds, rank, size, start = old["numbers"].tolist()
        memory.worker.copy_(old["worker"])
        if (exchange.rank, exchange.size) == (rank, size):
            memory.server.copy_(old["server"][: memory.server.numel()])
        else:  # of the mean, in which one replica counts 1 / size
            chunk = memory.worker[start : start + old["server"].numel()]
            server = old["server"][: chunk.numel()].to(chunk.device)
            chunk.add_(server, alpha=exchange.size)
        self.memory = memory

    def memory_state(self) -> dict[str, Any] | None:
        """What the codec left out at this replica; None: nothing."""
        memory = self.memory
        if memory is None:
            return None
        starts, rank = memory.starts, memory.rank
        server = memory.worker.new_zeros(starts[1])  # as long at every replica
        server[: memory.server.numel()] = memory.server
        return {
            "numbers": torch.tensor([memory.rounds, rank, memory.size, starts[rank]]),
            "worker": memory.worker,
            "server": server,
        }
