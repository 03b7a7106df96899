"""Compressed gradients for torch's FSDP2: a reduce-scatter in place of its own.

    for module in model.modules():
        if isinstance(module, FSDPModule):  # each module gets an object of its own
            module.set_custom_reduce_scatter(pyops.comm.fsdp_reduce_scatter(OneBit()))

    gradients of a module, flat     | for rank 0 | for rank 1 |    + this rank's error
                                          |            |           encoded, sent, summed in fp32
    output of rank 0, 1             |   mean     |   mean     |

Each slice is written once and read once. What the codec leaves out of a gradient is added to the
next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.buckets.bucket_errors import check_codec
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.work import Work
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed import compressed_reduce_scatter
from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.comm.compression.refusal import refuse
from pyops.flat import Shard

__all__ = ["FSDPReduceScatter", "fsdp_reduce_scatter"]


class FSDPReduceScatter:
    """The object that `FSDPModule.set_custom_reduce_scatter` takes; `fsdp_reduce_scatter` makes it.

    It serves one module: the errors belong to that module's gradients. When some of its parameters
    get no gradient, FSDP reduces the others alone, in a shorter tensor; each length has errors of
    its own.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._memories: dict[int, ErrorFeedback] = {}
        self._loaded: dict[str, Any] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the input or the output."""
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce the ranks' inputs into this rank's output.

        Args:
            output_tensor: [n], overwritten by this rank's part of the sum, or mean.
            input_tensor: [ranks * n], left as it is.
            group: The ranks.
            op: torch's ReduceOp.SUM or AVG.
            async_op: Whether to return a Work instead of waiting.

        Raises:
            ValueError: Another op, or an output of another size; before anything is sent.
        """
        communicator, label = Communicator.of(group), "FSDP's gradients"
        try:
            name = _name_of(op)
            error = self._memory(input_tensor, communicator)
            if output_tensor.numel() * communicator.size != input_tensor.numel():
                raise ValueError(
                    f"the output has {output_tensor.numel()} elements; of "
                    f"{input_tensor.numel()} for {communicator.size} ranks "
                    f"each gets {input_tensor.numel() / communicator.size:g}"
                )
        except (TypeError, ValueError) as mistake:
            work = refuse(mistake, communicator, what=label, tensor=input_tensor, async_op=async_op)
        else:
            work = compressed_reduce_scatter(
                input_tensor,
                codec=self.codec,
                error=error,
                op=name,
                communicator=communicator,
                async_op=async_op,
                label=label,
            )
        if async_op:
            return _Copied(work, output_tensor)
        output_tensor.copy_(work)
        return None

    def _memory(self, tensor: Tensor, communicator: Communicator) -> ErrorFeedback:
        numel = tensor.numel()
        if numel not in self._memories:
            memory = ErrorFeedback(
                numel, codec=self.codec, communicator=communicator, device=tensor.device
            )
            if (saved := self._loaded.get(str(numel))) is not None:
                rows = saved["worker"]["tensor"]
                ranks = (rows.global_shape if isinstance(rows, Shard) else rows.shape)[0]
                if ranks != communicator.size:
                    raise ValueError(
                        f"the errors are of {ranks} ranks and this run has "
                        f"{communicator.size}, for which FSDP cuts gradients "
                        "otherwise; go on without this state, which begins with errors of zero"
                    )
                memory.load_state_dict(saved)
            self._memories[numel] = memory
        return self._memories[numel]

    def state_dict(self) -> dict[str, Any]:
        """{"codec", "errors": {length of the input: ...}}: `pyops.flat.Shard`s, which
        pyops.checkpoint takes in `state`."""
        errors = {
            key: saved for key, saved in self._loaded.items() if int(key) not in self._memories
        }
        errors |= {str(numel): memory.state_dict() for numel, memory in self._memories.items()}
        return {"codec": self.codec.name, "worker": errors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the errors of a run on as many ranks; they replace those of this one.

        Raises:
            ValueError: For the state of another codec (naming both). On another number of ranks
                FSDP's input has another layout, of which this object knows nothing: ValueError when
                such errors would be used.
        """
        check_codec(state, self.codec)
        self._memories, self._loaded = {}, dict(state["worker"])


class _Copied(Work):
    """A reduce-scatter whose result goes to the tensor that the caller gave."""

    def __init__(self, work: Work, output: Tensor) -> None:
        self._work, self._output = work, output

    def wait(self) -> Tensor:
        self._output.copy_(self._work.wait())
        return self._output

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _name_of(op: Any) -> str:
    for known, name in ((dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "mean")):
        if op == known:
            return name
    raise ValueError(
        f"FSDP asked for {op}; a compressed reduce-scatter knows SUM and AVG: leave "
        "set_gradient_divide_factor alone, or set "
        "set_force_sum_reduction_for_comms(True)"
    )


def fsdp_reduce_scatter(codec: Codec) -> FSDPReduceScatter:
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`; make one for each module.

    Its `state_dict()` and `load_state_dict()` carry the errors. It has not yet run on CUDA.

    Args:
        codec: Any elementwise codec, the same on every rank, or backward raises DisagreementError.
            Gradients may be float32, bfloat16 or float16.

    Raises:
        TypeError: codec is no codec.
        ValueError: codec needs whole matrices, as PowerSGD does.
    """
    if not isinstance(codec, Codec):
        raise TypeError(f"codec is {codec!r}; expected a codec such as pyops.comm.OneBit()")
    if hasattr(codec, "all_reduce"):
        raise ValueError(
            f"{codec.name} needs whole matrices, and FSDP gives flat slices; use an "
            "elementwise codec, such as Int8()"
        )
    return FSDPReduceScatter(codec)
