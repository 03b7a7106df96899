"""What a program finds in `.grad` between backward and step, and what it may have done to it.

backward ends      every parameter's .grad is its ReducedGradient
.grad is None      somebody forgot it, model.zero_grad() say: it counts no more
.grad is another   somebody put it there, and no backward will reduce it: the step is refused, on
                   all ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from pyops.comm.collectives.communicator import Communicator
from pyops.torch_private import graph_task_id, without_torch_function
from pyops.zero.hooks.reduce_scatter_bucket import ReduceScatterBucket
from pyops.zero.hooks.reduced_gradient import GradientNorms, ReducedGradient
from pyops.zero.hooks.sharded_gradients import ShardedGradients
from pyops.zero.layout.partition import Piece

__all__ = ["PublishedGradients", "gradients_set_by_hand"]


def gradients_set_by_hand(names: Sequence[str]) -> RuntimeError:
    """What to raise where a step finds gradients that backward has not made.

    Args:
        names: Of their parameters on this rank.
    """
    return RuntimeError(
        "ZeroOptimizer takes gradients from backward(), which reduces them over the "
        "ranks; somebody has set .grad of "
        f"{list(names[:3]) if names else 'a parameter on another rank'}: multiply the "
        "loss, or scale what is in .grad in place"
    )


class PublishedGradients:
    """The ReducedGradients of what `gradients` reduces.

    Args:
        communicator: Of the ranks that own parts, None where this one owns everything.
        device: Of the norms.
        partial_because: Why gradients are not final before the step, None where they are.
        other_axes: Of the tensor-parallel ranks and of the pipeline stages.
    """

    def __init__(
        self,
        gradients: ShardedGradients,
        communicator: Communicator | None,
        *,
        device: torch.device,
        partial_because: str | None,
        other_axes: Sequence[Communicator] = (),
    ) -> None:
        self._gradients = gradients
        self._places: list[tuple[nn.Parameter, ReduceScatterBucket, Piece, int]] = []
        for f, flat in enumerate(gradients.flats):
            pieces = {piece.index: piece for piece in flat.partition.pieces(flat.rank)}
            for index, parameter in enumerate(flat.parameters):
                bucket = gradients.of_flat[f][pieces[index].bucket]
                self._places.append((parameter, bucket, pieces[index], len(self._places)))
        norms = self._norms = GradientNorms(
            self._parts, communicator, device, partial_because, other_axes
        )
        self._reduced = [
            ReducedGradient(
                bucket.view_like(piece.index),
                bucket.flat.device,
                label=bucket.flat.names[piece.index],
                number=number,
                norms=norms,
                local=partial(bucket.part, piece),
            )
            for _, bucket, piece, number in self._places
        ]
        gradients.before_backward = self.forget
        gradients.after_reducing = self.show

    def _parts(self) -> list[Tensor]:
        found = [bucket.part(piece) for _, bucket, piece, _ in self._places]
        return [torch.empty(0, device="cpu") if each is None else each for each in found]

    def changed(self) -> None:
        """Somebody is about to change the chunks: norms are measured anew."""
        self._norms.changed()

    def show(self) -> None:
        """All gradients are reduced."""
        self._norms.changed()
        with without_torch_function():
            for (parameter, *_), reduced in zip(self._places, self._reduced, strict=True):
                parameter.grad = reduced

    def _others(self, arriving: int | None = None) -> Iterator[tuple[int, Tensor | None]]:
        """(number of a parameter, what is in its .grad) where that is neither what was put there
        nor still to be reduced.

        arriving: the number of the parameter that has just got a gradient.
        """
        with without_torch_function():
            for (parameter, bucket, piece, number), reduced in zip(
                self._places, self._reduced, strict=True
            ):
                found = parameter.grad
                if bucket.takes(piece.index):
                    if bucket.was_dropped(piece.index, arriving=number == arriving):
                        yield number, None
                elif not reduced.is_of(found):
                    yield number, found

    def _drop(self, number: int) -> None:
        part = self._reduced[number].part_or_none()
        if part is not None:
            part.zero_()
            self._norms.changed()
        self._gradients.used[number] = 0

    @torch.no_grad()
    def forget(self, arriving: int | None) -> None:
        """Another backward has begun: what was forgotten, or replaced, before it doesn't count."""
        if any(bucket.chunk is not None for bucket in self._gradients.buckets):
            added = arriving, graph_task_id()
            for number, _ in list(self._others(arriving)):
                if (
                    number != arriving or self._norms.added != added
                ):  # with create_graph=True the sum is another tensor
                    self._drop(number)

    @torch.no_grad()
    def settle(self) -> list[str]:
        """A step begins: what was forgotten doesn't count. The names of parameters with gradients
        that nothing will reduce."""
        strange = []
        for number, found in list(self._others()):
            if found is None:
                self._drop(number)
            else:
                strange.append(self._reduced[number].label)
        return strange
