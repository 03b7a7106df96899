"""What a side stream of CUDA is told, and what is asked of the device, seen by stand-ins for both:
no GPU is needed."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyops.comm.collectives import probe
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.communicator.side_streams import SideStreams

pytestmark = pytest.mark.cpu_only


class OnDevice:
    """A tensor of CUDA, as far as the communicator looks at it."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.told: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.told.append(stream)

    def numel(self) -> int:
        return 1 << 20

    def element_size(self) -> int:
        return self.dtype.itemsize


def _communicator(size: int) -> Any:
    found: Any = Communicator.__new__(Communicator)
    found.size, found._costs, found._streams = size, {}, SideStreams()
    found._broken, found.sequence, found._uncounted = None, 0, 0
    found.transport = SimpleNamespace(bytes_sent=0)
    return found


def test_the_memory_of_a_result_outlives_the_side_stream(monkeypatch: pytest.MonkeyPatch):
    """A Work that is dropped frees an `out` of the caller's, which the stream may be writing."""
    side = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    x, out = OnDevice(), OnDevice()
    _communicator(2).run(lambda spins: out, what="", tensor=x, async_op=True, direct=True)
    assert x.told == [side]
    assert out.told == [side]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_nothing_is_measured_on_nccl(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    """A measurement waits for the device, within backward, and is an error in a capture."""

    def measure(*_: object, **__: object) -> None:
        pytest.fail("measured")

    monkeypatch.setattr(probe, "measure", measure)
    comm = _communicator(2)
    comm.backend = lambda device: "nccl"
    choose = Communicator.choose
    assert choose(comm, "auto", OnDevice(dtype), runners=lambda name: pytest.fail(name)) == "native"
