"""What one param group does on one device in a step, remembered so that the next step only checks
that it still holds.

    first step            gather rows -> table of pointers -> scan remembers parameters and
                          gradients
    every other step      scan: the same? -> one call on the table, whatever the number of tensors
                          gradients moved (set_to_none makes new ones): the scan wrote the new
                          addresses itself
                          anything else: gather again

On the CPU the scan writes into the table. On CUDA it writes into a mirror of the column, which is
copied without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from pyops.ops.optimizers.table import gradients_fit
from pyops.optim.fused.table_rows import GRAD, PARAM, Row, columns_of, split_rows

__all__ = ["TablePlan"]


class TablePlan:
    """One group on one device.

    table: of the rows that fit one, or None. leftover: places in the group of the others, in lists
    to be launched one after the other; they are gathered anew each step. written: what a launch of
    the table changes and autograd must be told of. key: what must be unchanged for the optimizer,
    besides tensors.
    """

    def __init__(
        self,
        params: list[Tensor],
        rows: Sequence[Row],
        *,
        make_table: Callable[[list[list[Tensor]], list[int]], Tensor],
        native: ModuleType,
    ) -> None:
        """params: the group's own list. rows: of one device, checked; parameters that have none are
        on another device or have no gradient."""
        self.table: Tensor | None = None
        self.written: list[Tensor] = []
        self._watched: list[tuple[torch.UntypedStorage, int]] = []
        self.key: tuple[object, ...] = ()
        self._params = params
        fast, others = split_rows(rows)
        self.leftover = [[row.place for row in each] for each in others]
        kinds = [
            native.ParameterScan.ABSENT if p.grad is None else native.ParameterScan.IGNORED
            for p in params
        ]
        for row in rows:
            kinds[row.place] = native.ParameterScan.ELSEWHERE
        for row in fast:
            kinds[row.place] = native.ParameterScan.ROW
        self._scan = native.ParameterScan(
            params, kinds, torch.Tensor, torch.nn.Parameter, gradients_fit
        )
        if fast:
            columns = columns_of(fast)
            self.table = make_table(columns, [row.offset for row in fast])
            self._keep(columns)
            self._attach(self.table)

    def _keep(self, columns: list[list[Tensor]]) -> None:
        """Hold what the table points to, except gradients, whose memory should be free in the next
        forward pass."""
        copies = columns[-2]
        self.written = columns[PARAM] + [t for t in copies if t.numel()]
        # Storages too: when somebody swaps the `.data` of a state, the table must not lead to freed
        # memory.
        self._kept = [t for i, column in enumerate(columns) if i != GRAD for t in column]
        self._storages = [t.untyped_storage() for column in columns[GRAD + 1 :] for t in column]
        # One of each kind of state is asked before each step for its memory: who gives that back,
        # gives back all.
        some = [column[0].untyped_storage() for column in columns[GRAD + 1 :] if column]
        self._watched = [(storage, storage.nbytes()) for storage in some]

    def _attach(self, table: Tensor) -> None:
        """Tell the scan where addresses of gradients go."""
        self._mirror: Tensor | None = None
        if table.device.type == "cpu":
            self._scan.attach(table.data_ptr(), table.shape[1], GRAD)
        else:
            self._mirror = torch.zeros(table.shape[0], dtype=torch.int64, device="cpu")
            self._scan.attach(self._mirror.data_ptr(), 1, 0)

    def still_holds(self, params: list[Tensor], key: tuple[object, ...]) -> bool:
        """Whether the plan is right for this step; the table's gradient column is brought up to
        date."""
        if (
            params is not self._params
            or key != self.key
            or any(s.nbytes() != n for s, n in self._watched)
        ):
            return False
        verdict = self._scan.check()
        if verdict == self._scan.MOVED and self.table is not None and self._mirror is not None:
            self._upload(self.table, self._mirror)
        return bool(verdict != self._scan.REBUILD)

    def _upload(self, table: Tensor, mirror: Tensor) -> None:
        """Copy the gradient column to the device, without waiting.

        The pinned source is new each time: the copy from the last one may not have happened yet.
        """
        source = torch.empty(mirror.shape, dtype=torch.int64, pin_memory=True, device="cpu")
        source.copy_(mirror)
        table[:, GRAD].copy_(source, non_blocking=True)
