"""Compressed gradients for torch's DistributedDataParallel: a hook that reduces a bucket.

    state, hook = pyops.comm.ddp_hook(OneBit(), model=model)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, hook)

    iteration 0    [ head, block 1 ]   [ block 0, embedding ]     by the order of registration
    iteration 1    [ head ]   [ block 1, embedding ]   [ block 0 ]     as gradients arrived

DDP lays its buckets out anew after the first iteration, so errors are kept by parameter. Where a
bucket is new, each rank takes the errors of the bucket's parameters along, without a message: its
own errors, and its part of the shared ones, which it adds to its own so that the sum of all does
not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyops.comm.buckets.bucket_errors import (
    check_codec,
    fold,
    join_states,
    new_memory,
    part_of_state,
    take,
)
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed import compressed_all_reduce
from pyops.comm.compression.refusal import refuse
from pyops.flat import FlatLayout
from pyops.mesh import check_initialized

__all__ = ["HookState", "ddp_hook"]


class HookState:
    """What the hook keeps: the codec, and the errors of each bucket by the parameters in it.
    `ddp_hook` makes it."""

    def __init__(
        self, codec: Codec, *, group: dist.ProcessGroup | None, model: nn.Module | None
    ) -> None:
        self.codec, self.group = codec, group
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self._named = (
            None if inner is None else [n for n, p in inner.named_parameters() if p.requires_grad]
        )
        self._names = {} if inner is None else {id(p): name for name, p in inner.named_parameters()}
        self._held: list[
            Tensor
        ] = []  # parameters that are known by their id, which must stay theirs
        self._memories: dict[tuple[str, ...], Any] = {}
        self._key_of: dict[str, tuple[str, ...]] = {}  # the bucket that a parameter is in
        self._loaded: Mapping[str, Any] | None = None
        self._streams: dict[torch.device, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The errors by parameter name, as `DataParallel.communication_state`.

        The tensors share memory with the errors in use: save or copy them before the next backward.

        Raises:
            ValueError: When `ddp_hook` was given no model.
        """
        self._named_parameters()
        if not self._memories:
            return (
                dict(self._loaded)
                if self._loaded is not None
                else {"codec": self.codec.name, "worker": {}}
            )
        return join_states([memory.state_dict() for memory in self._memories.values()])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the errors of a run on any number of ranks, as a checkpoint gives them; they
        replace those of this one.

        Raises:
            ValueError: For the state of another codec (naming both) or of another model, or when
                `ddp_hook` was given no model.
        """
        check_codec(state, self.codec)
        absent = [name for name in self._named_parameters() if name not in state["worker"]]
        if absent and state["worker"]:
            raise ValueError(
                f"the hook's state has no errors for {absent[0]!r}; it is of another model"
            )
        self._memories, self._key_of = {}, {}
        self._loaded = state if state["worker"] else None

    def _named_parameters(self) -> list[str]:
        if self._named is None:
            raise ValueError(
                "a state is keyed by the parameters' names, and this hook does not know "
                "them; use ddp_hook(codec, model=model)"
            )
        return self._named

    def _name(self, parameter: Tensor) -> str:
        name = self._names.get(id(parameter))
        if name is None and self._named is not None:
            raise ValueError(
                f"DDP reduces a parameter of shape {tuple(parameter.shape)} that the "
                "model given to ddp_hook does not have; "
                "give it the model that DDP wraps"
            )
        if name is None:
            self._held.append(parameter)
            name = self._names[id(parameter)] = f"parameter {len(self._names)}"
        return name

    def memory(
        self, parameters: Sequence[Tensor], *, communicator: Communicator, device: torch.device
    ) -> Any:
        """The errors of a bucket; those of its parameters, as far as they were in others, where it
        is new."""
        key = tuple(self._name(p) for p in parameters)
        if key in self._memories:
            return self._memories[key]
        rank, size = communicator.rank, communicator.size
        layout = FlatLayout.plan(
            [(name, p.shape) for name, p in zip(key, parameters, strict=True)], alignment=1
        )
        memory = new_memory(self.codec, layout, rank=rank, size=size, device=device)
        if self._loaded is not None and not any(name in self._key_of for name in key):
            memory.load_state_dict(part_of_state(self._loaded, key))
        for name in key:
            if name in self._key_of:
                before = self._memories[self._key_of[name]]
                fold(before)
                take(memory, name, before)
            self._key_of[name] = key
        in_use = set(self._key_of.values())
        self._memories = {k: m for k, m in self._memories.items() if k in in_use} | {key: memory}
        return memory

    def future(
        self, work: Any, tensor: Tensor, *, communicator: Communicator
    ) -> torch.futures.Future[Tensor]:
        """A Future that `work` completes, without anybody waiting for it here."""
        if tensor.is_cuda:
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[tensor.device])
            if tensor.device not in self._streams:
                self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
            stream = self._streams[tensor.device]
            with torch.cuda.stream(
                stream
            ):  # the future's event is of this stream, so that backward goes on on its own
                work.wait()
                future.set_result(tensor)
            return future
        future = torch.futures.Future()

        def finish() -> Tensor:
            try:
                work.wait()
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]  # torch's own stub says T
            else:
                future.set_result(tensor)
            return tensor

        communicator.worker.submit(finish)
        return future


def _hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    tensor = bucket.buffer()
    communicator = Communicator.of(state.group)
    if communicator.size == 1:
        alone: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[tensor.device] if tensor.is_cuda else []
        )
        alone.set_result(tensor)
        return alone
    label = f"DDP's bucket {bucket.index()}"
    try:
        memory = state.memory(bucket.parameters(), communicator=communicator, device=tensor.device)
    except (TypeError, ValueError) as mistake:
        work = refuse(mistake, communicator, what=label, tensor=tensor, async_op=True)
    else:
        work = compressed_all_reduce(
            tensor,
            codec=state.codec,
            error=memory,
            communicator=communicator,
            op="mean",
            async_op=True,
            label=label,
        )
    return state.future(work, tensor, communicator=communicator)


# DDP compares the annotations with the types themselves, which a module of postponed annotations
# has as text.
_hook.__annotations__.update(
    {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
)


def ddp_hook(
    codec: Codec, *, group: dist.ProcessGroup | None = None, model: nn.Module | None = None
) -> tuple[HookState, Callable[[HookState, dist.GradBucket], torch.futures.Future[Tensor]]]:
    """(state, hook) for `DistributedDataParallel.register_comm_hook`: every bucket's mean by
    `compressed_all_reduce`.

    Works with no_sync, find_unused_parameters, static_graph and gradient_as_bucket_view. Of a
    parameter that no rank used, DDP throws away what came out of the reduction, and a hook is not
    told: that part of its errors is lost. One rank alone compresses nothing. On CUDA not yet run.

    Li et al., PyTorch Distributed, VLDB 2020; error feedback: Karimireddy et al., ICML 2019.

    Args:
        codec: The same on every rank, or DisagreementError in backward.
        group: DDP's; None: all ranks.
        model: The module, or its DDP, for the names under which `state.state_dict()` saves the
            errors; training alone does not need it.

    Raises:
        TypeError: For what is no codec.
    """
    check_initialized("ddp_hook", group)
    if not isinstance(codec, Codec):
        raise TypeError(f"codec is {codec!r}; expected a codec such as pyops.comm.OneBit()")
    return HookState(codec, group=group, model=model), _hook
