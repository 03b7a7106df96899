"""The CUDA stream that collectives have beside that of the program.

program's stream   backward ......... backward ......... wait ... optimizer
side stream        |-- bucket 0 --|   |-- bucket 1 --|
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.shared_memory import SPINS_ALONE
from pyops.comm.collectives.work import StreamWork, Work

__all__ = ["SideStreams"]


class SideStreams:
    """One stream for each device, made when the first collective of its tensors needs it."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def put(self, call: Callable[[int], Tensor], tensor: Tensor) -> Work:
        """Put the collective on the side stream, after what the current stream has so far.

        Args:
            call: The collective; it gets the number of times to look before it sleeps.
            tensor: What it reads.

        Returns:
            A Work, for which the current stream waits in `wait()`.
        """
        stream = self._of(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            result = call(SPINS_ALONE)
            # An `out` of the caller's: freed with a Work that nobody waits for, its memory would be
            # given to the caller's stream while it is still being written.
            result.record_stream(stream)
            return StreamWork(result, stream.record_event())

    def for_thread(self, call: Callable[[int], Tensor], tensor: Tensor) -> Callable[[int], Tensor]:
        """The collective for a thread whose current stream is not the caller's.

        Args:
            call: The collective.
            tensor: What it reads.

        Returns:
            A function that runs it on the side stream, after what the caller's stream has now, and
            to its end, so that whoever waits for the thread may use the result on any stream.
        """
        stream = self._of(tensor.device)
        ready = torch.cuda.current_stream(tensor.device).record_event()
        tensor.record_stream(stream)

        def there(spins: int) -> Tensor:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                result = call(spins)
                stream.synchronize()
            return result

        return there

    def _of(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
