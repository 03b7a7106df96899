"""A compressed all-reduce between nodes: exact within a node, payloads between nodes.

node 0   reduce_scatter -- part 0 -- compressed all_reduce with part 0 of node 1 -- all_gather
                        -- part 1 -- compressed all_reduce with part 1 of node 1 -- all_gather
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.arithmetic import row_starts
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import gather_bytes, reduce_scatter
from pyops.comm.collectives.functional.call_options import CallOptions
from pyops.comm.collectives.work import Work
from pyops.comm.compression import compressed_shots as shots
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed.call import (
    agree_on,
    flat_view,
    is_staged,
    memory_of,
    payload_transport,
    run_call,
    segment_of,
)
from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.comm.compression.refusal import (
    check_error,
    check_tensor,
    compares,
    mistake_of,
    refusing,
)
from pyops.comm.failure import DisagreementError
from pyops.protocols import CollectiveCodec

__all__ = ["all_reduce_between_nodes"]


def all_reduce_between_nodes(
    tensor: Tensor,
    codec: Codec,
    error: ErrorFeedback | None,
    across: Communicator | None,
    node: Communicator,
    op: str,
    async_op: bool,
    options: CallOptions,
) -> Any:
    """Sum exactly within the node, each rank a part; compress that part's way between the nodes;
    bring the parts together.

    Every call joins its group's queue here, on the caller's thread, so that the order is the same
    on all ranks; each waits for the one before on its own group's thread. What goes wrong within a
    node is told to the other nodes.
    """
    if across is None:
        raise ValueError("within= needs torch.distributed: initialise it, or call without within")

    def check() -> None:
        check_tensor(tensor, codec, op=op, segment_bytes=options.segment_bytes)
        part = row_starts(tensor.numel(), node.size)[node.rank : node.rank + 2]
        check_error(error, codec, x=tensor, numel=part[1] - part[0], comm=across)

    what = f"compressed_all_reduce{options.of_label} between nodes"
    if mistake := mistake_of(check):
        return _refuse_in_node(mistake, across, node, what, tensor, async_op)
    starts = row_starts(tensor.numel(), node.size)
    scale, segment = (1.0 / across.size if op == "mean" else 1.0), segment_of(options)
    first = reduce_scatter(
        flat_view(tensor)[0], op=op, communicator=node, async_op=True, label=options.label
    )

    def between(spins: int) -> Tensor:
        part = _or_tell(first, across, what)
        agree_on(across, "compressed_all_reduce", part, (codec.name, scale, segment, node.size))
        transport, memory = payload_transport(across, part), memory_of(error, codec, across)
        if isinstance(codec, CollectiveCodec):
            codec.all_reduce(part, error=error, transport=transport, scale=scale)
        else:
            shots.all_reduce(
                part, codec=codec, transport=transport, segment=segment, memory=memory, scale=scale
            )
        return part

    second = run_call(across, between, what, tensor, codec, True)

    def together(spins: int) -> Tensor:
        part = _or_tell(second, node, what).view(torch.uint8)
        whole = part.new_empty(tensor.numel() * tensor.element_size())
        in_bytes = [start * tensor.element_size() for start in starts]
        gather_bytes(node, part, whole, in_bytes, spins=spins)
        tensor.copy_(whole.view(tensor.dtype).view(tensor.shape))
        return tensor

    direct = tensor.is_cuda and not is_staged(node, tensor)
    return node.run(
        together, what=f"{what}, all_gather within", tensor=tensor, async_op=async_op, direct=direct
    )


def _refuse_in_node(
    mistake: Exception,
    across: Communicator,
    node: Communicator,
    what: str,
    tensor: object,
    async_op: bool,
) -> Any:
    """As `refuse`, in the place of the three calls of `all_reduce_between_nodes`."""
    if not (compares(node, tensor) and compares(across, tensor)):
        raise mistake

    def run(comm: Communicator, call: Any, async_op: bool) -> Any:
        return comm.run(
            call, what=what, tensor=torch.empty(0, device="cpu"), async_op=async_op, direct=False
        )

    first = run(node, refusing(mistake, node, what=what), True)
    second = run(across, lambda spins: _or_tell(first, across, what), True)
    return run(node, lambda spins: _or_tell(second, node, what), async_op)


def _or_tell(before: Work, comm: Communicator, what: str) -> Tensor:
    """What `before` gives; where it gives an error instead, the ranks of `comm`, which will wait
    for this one, are told."""
    try:
        return before.wait()
    except (DisagreementError, TypeError, ValueError) as error:
        if comm.size > 1:
            comm.agree(what, refusal=error)
        raise
