"""Symmetric memory of ranks that are processes: files that all of them map, and the kernels of the
host."""

from __future__ import annotations

import ctypes
import types
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.collectives.symmetric import memory as memory_module
from pyops.ops.communication.symmetric import Peers
from pyops.zero.update import symmetric_update as step_module
from tests.cuda.symmetric.test_kernel import addresses
from tests.cuda.test_kernels import CODES, pointer

__all__ = ["MappedFiles", "sum_of_rank"]


def sum_of_rank(
    kernels: ctypes.CDLL,
    whole: Tensor,
    outs: list[Tensor],
    rows: list[Tensor],
    peers: Peers,
    *,
    ctas: int,
    scale: float,
    norm: Tensor | None,
) -> None:
    """`symmetric_sum_` of one rank, by the kernel of the host."""
    size = len(rows)
    pack = 16 // max(outs[0].element_size(), rows[0].element_size())
    at = {t.data_ptr() // t.element_size() % pack for t in (*rows, *outs)}
    kernels.emulated_symmetric_rank(
        min(ctas, 2),
        peers.rank,
        size,
        1,
        addresses([rows]),
        addresses([[*outs, *[None] * (size - len(outs))]]),
        addresses([peers.pads]),
        ctypes.c_int64(rows[0].numel()),
        -min(at) % pack if len(at) == 1 else -1,
        ctypes.c_double(scale),
        CODES[outs[0].dtype],
        CODES[rows[0].dtype],
        pointer(norm),
        pointer(whole),
        ctypes.c_int64(whole.numel()),
        pointer(peers.failure),
        ctypes.c_int64(int(peers.timeout * 1e9)),
    )


class MappedFiles:
    """torch's symmetric memory, as far as pyops asks for it: rank r's n-th buffer is a file.

    buffers: how many this rank can have; None: any number.
    """

    def __init__(self, folder: str, library: str, group: Any, *, buffers: int | None) -> None:
        self.folder, self.kernels, self.left = folder, ctypes.CDLL(library), buffers
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.made = self.launches = self.sums = 0

    def _file(self, rank: int, number: int, numel: int, dtype: torch.dtype) -> Tensor:
        name = f"{self.folder}/{rank}.{number}"
        return torch.from_file(name, shared=True, size=numel, dtype=dtype)

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.left == 0:
            raise RuntimeError("CUDA driver error: no room for it")
        self.left = None if self.left is None else self.left - 1
        self.made += 1
        return self._file(self.rank, self.made, numel, dtype)

    def rendezvous(self, tensor: Tensor, group: Any) -> Any:
        return types.SimpleNamespace(multicast_ptr=0, number=self.made)

    def remote(self, handle: Any, rank: int, like: Tensor) -> Tensor:
        if rank == self.rank:
            return like
        return self._file(rank, handle.number, like.numel(), like.dtype)

    def sum(
        self,
        whole: Tensor,
        outs: list[Tensor],
        rows: list[Tensor],
        peers: Peers,
        *,
        ctas: int,
        scale: float,
        norm: Tensor | None,
    ) -> None:
        self.sums += 1
        sum_of_rank(self.kernels, whole, outs, rows, peers, ctas=ctas, scale=scale, norm=norm)

    def step(
        self,
        table: Tensor,
        grads: list[Tensor],
        params: list[Tensor],
        peers: Any,
        lr_tensor: Tensor | None,
        factor: Tensor | None,
        found_inf: Tensor | None,
        *,
        ctas: int,
        scale: float,
        in_fp32: bool,
        decoupled: bool,
        maximize: bool,
        **scalars: float,
    ) -> None:
        assert lr_tensor is None
        self.launches += 1

        def shifts(of: list[Tensor]) -> ctypes.Array[ctypes.c_int64]:
            here = of[self.rank].data_ptr()
            return (ctypes.c_int64 * len(of))(*[t.data_ptr() - here for t in of])

        names = ("lr", "beta1", "beta2", "eps", "weight_decay")
        self.kernels.emulated_symmetric_step_rank(
            min(ctas, 2),
            self.rank,
            self.size,
            pointer(table),
            len(table),
            (ctypes.c_void_p * self.size)(*[pad.data_ptr() for pad in peers.pads]),
            shifts(grads),
            shifts(params),
            ctypes.c_double(scale),
            (ctypes.c_double * 5)(*[scalars[name] for name in names]),
            decoupled | maximize << 1 | in_fp32 << 2,
            pointer(factor),
            pointer(found_inf),
            pointer(peers.failure),
            ctypes.c_int64(int(60e9)),
        )

    def __enter__(self) -> MappedFiles:
        self.patches = [
            mock.patch.object(memory_module, "_problem", return_value=""),
            mock.patch.object(memory_module, "symmetric_empty_tensor", self.empty),
            mock.patch.object(memory_module, "symmetric_rendezvous", self.rendezvous),
            mock.patch.object(memory_module, "symmetric_remote", self.remote),
            mock.patch.object(memory_module, "symmetric_sum_", self.sum),
            mock.patch.object(step_module, "symmetric_adam_from_table_", self.step),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()
