"""Reduce-scatter, Adam and all-gather of stages 1 and 2 in one kernel over symmetric memory.

    backward   adds gradients up in symmetric memory, whole, and sends nothing
    step       one kernel for each param group: every rank's gradients of this rank's shard are read
               from their memory and added in the order of ranks; Adam; the parameters are stored
               into every rank's memory
    forward    finds them there

The bits are those of a reduce-scatter, the step and an all-gather, in that order of summation. The
kernel: csrc/cuda/communication/symmetric_step.cuh.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.symmetric import (
    SymmetricBuffer,
    SymmetricMemory,
    Unavailable,
    memory_of,
)
from pyops.ops.communication.symmetric import Peers
from pyops.ops.optimizers.table import COLUMNS, optimizer_table
from pyops.ops.symmetric_step import symmetric_adam_from_table_
from pyops.optim.adam import Adam
from pyops.zero.layout.parameters import FlatParameters
from pyops.zero.update.sharded_optimizer_state import ShardedOptimizerState

__all__ = ["SymmetricUpdate", "check_symmetric_step"]

ALIGNMENT = 256  # bytes between the beginnings of flat buffers


def check_symmetric_step(optimizer_class: type, arguments: Any, *, without: Any) -> None:
    """ValueError for an optimizer, or an option beside it, that the kernel does not have.

    Args:
        optimizer_class: Of the inner optimizer.
        arguments: Its arguments.
        without: Options that must be None or False, by name.
    """
    if not issubclass(optimizer_class, Adam):
        raise ValueError(
            f"ZeroOptimizer: symmetric_step is True, but the optimizer is "
            f"{optimizer_class.__name__}; the kernel is that of pyops.optim.Adam and AdamW: use "
            "one of them, or leave symmetric_step out"
        )
    set_ = {name: arguments.get(name) for name in ("amsgrad", "stochastic_rounding", "copies")}
    for name, value in {**set_, **without}.items():
        if value is not None and value is not False:
            raise ValueError(
                f"ZeroOptimizer: symmetric_step is True, but {name} is {value!r}, which the kernel "
                "does not have; leave one of them out"
            )


class SymmetricUpdate:
    """The gradients and parameters of flat buffers in symmetric memory, and the step over them.
    `of` makes it.

    Attributes:
        gradients: Memory for the whole gradients of each flat buffer.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        flats: Sequence[FlatParameters],
        buffers: tuple[SymmetricBuffer, SymmetricBuffer],
        *,
        scale: float,
    ) -> None:
        """Moves the parameters of `flats` into the first of the buffers."""
        self._memory, self._scale = memory, scale
        self._params, self._grads = buffers
        self._most = sum(max(_chunks(flat)) for flat in flats)
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self.gradients = []
        for flat, start in zip(flats, _starts(flats)[:-1], strict=True):
            numel = flat.data.numel()
            flat.move(self._params.tensor[start:].view(flat.dtype)[:numel])
            self.gradients.append(self._grads.tensor[start:].view(flat.dtype)[:numel])

    @staticmethod
    def of(
        flats: Sequence[FlatParameters], communicator: Communicator, *, reduction: str
    ) -> SymmetricUpdate | None:
        """Collective. None, on every rank alike, where any rank has no symmetric memory, or not
        enough: rank 0 says so in a warning, and the step is that of three collectives.

        Args:
            flats: The flat parameters, on one device.
            communicator: Of the ranks that own parts of them.
            reduction: "mean" or "sum".
        """
        device, scale = flats[0].device, 1.0 / communicator.size if reduction == "mean" else 1.0
        memory = memory_of(communicator, device)
        if memory is None:
            return None
        numel, buffers = _starts(flats)[-1], list[SymmetricBuffer]()
        try:
            for _ in range(2):
                buffers.append(memory.allocate(numel, torch.float32))
        except Unavailable as reason:
            for buffer in buffers:
                buffer.free()
            if communicator.rank == 0:
                warnings.warn(
                    "symmetric_step does not work here, and all ranks step by reduce-scatter, "
                    f"optimizer and all-gather instead: {reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return None
        return SymmetricUpdate(memory, flats, (buffers[0], buffers[1]), scale=scale)

    @torch.no_grad()
    def step(
        self, owned: ShardedOptimizerState, *, factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Step the pieces with the gradients that they were given, which are this rank's own and
        lie in `gradients`, summed over the ranks. Collective.

        Args:
            owned: The pieces; their optimizer is an Adam.
            factor: A scalar on the device that gradients are multiplied by; None for 1.
            found_inf: A scalar there, not 0 where the step is to change nothing; on all ranks
                alike.
        """
        optimizer: Any = owned.optimizer
        multiplier = None if factor is None else factor.to(torch.float32)

        def launch(lists: list[list[Tensor]], rate: Tensor | None, **scalars: Any) -> None:
            table = self._table(lists)

            def kernel(peers: Peers, ctas: int) -> None:
                symmetric_adam_from_table_(
                    table,
                    self._grads.ranks,
                    self._params.ranks,
                    peers,
                    rate,
                    multiplier,
                    found_inf,
                    ctas=ctas,
                    scale=self._scale,
                    in_fp32=False,
                    **scalars,
                )

            self._memory.launch(kernel, most=self._most, uses=(self._params, self._grads))

        pieces = owned.all_pieces()
        for each in pieces:
            # A piece without a number has no row; another rank may have one of its parameter.
            each.parameter.grad = each.gradient if each.piece.numel else None
        try:
            optimizer.step_by(launch)
        finally:
            for each in pieces:
                each.parameter.grad = each.gradient = None

    def close(self) -> None:
        """Give the memory back, when no parameter lies in it any more. Collective."""
        self._tables.clear()
        self.gradients = []
        self._memory.synchronize()
        self._params.free()
        self._grads.free()

    def _table(self, lists: list[list[Tensor]]) -> Tensor:
        """The optimizer's table of these lists, made once as long as they lie where they do."""
        key = tuple(t.data_ptr() for column in lists for t in column)
        if key not in self._tables:
            if len(self._tables) > 64:  # parameters that come and go
                self._tables.clear()
            device = self._params.tensor.device
            params, grads, averages, squares, largest, masters, copies, steps = lists
            self._tables[key] = (
                optimizer_table(params, grads, averages, squares, largest, masters, copies, steps)
                if params
                else torch.empty((0, COLUMNS), dtype=torch.int64, device=device)
            )
        return self._tables[key]


def _chunks(flat: FlatParameters) -> list[int]:
    """Elements of each rank's shard."""
    partition = flat.partition
    return [
        sum(
            c.stop - c.start for c in (partition.chunk(b, r) for b in range(len(partition.buckets)))
        )
        for r in range(partition.ranks)
    ]


def _starts(flats: Sequence[FlatParameters]) -> list[int]:
    """Where the flat buffers begin in one of float32, and where the last ends."""
    starts = [0]
    for flat in flats:
        nbytes = flat.data.numel() * flat.data.element_size()
        starts.append(starts[-1] + -(-nbytes // ALIGNMENT) * ALIGNMENT // 4)
    return starts
