"""The same parameters on every rank, each rank its own part of the batch: gradients are averaged
while backward runs.

rank 0   batch 0 -> module -> backward --buckets--.
                                                  all-reduce -> the same gradients -> the same step
rank 1   batch 1 -> module -> backward --buckets--'
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pyops.comm.agreement import gather, ranks_agree
from pyops.comm.broadcast import broadcast
from pyops.comm.buckets.reduce_axes import OwnRanks, check_grids_apart, own_ranks
from pyops.comm.buckets.reducer import Reducer
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.symmetric import DTYPES, SymmetricBuffer, symmetric_empty
from pyops.comm.compression.codec import Codec
from pyops.flat import FlatBuffer, InPlace, check_free, claim, release
from pyops.mesh import Mesh, ProcessGroupLike, axis_group, resolve
from pyops.renamed import refuse_renamed

__all__ = ["DataParallel"]

FIX = (
    "call close() of the old one before; load_state_dict() without assign=True loads values "
    "in place"
)
COMPRESSIBLE = (torch.float32, torch.bfloat16, torch.float16)


def _trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of every trained parameter; a shared one once, under its first name."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; expected an nn.Module")
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError(
            "the module has no parameter with requires_grad=True, so there is no "
            "gradient to reduce; use the module itself"
        )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device; materialize the module (module.to_empty, "
                "then initialize) first"
            )
    return named


def _check_codec(codec: Codec | None, named: list[tuple[str, nn.Parameter]]) -> None:
    """TypeError for what is no codec, or for a parameter whose gradient no codec takes."""
    if codec is None:
        return
    if not isinstance(codec, Codec):
        raise TypeError(
            f"codec is {codec!r}; expected a codec such as pyops.comm.OneBit(), or None"
        )
    for name, p in named:
        if p.dtype not in COMPRESSIBLE:
            raise TypeError(
                f"{name} is {p.dtype}, which {codec.name} can't compress; use float32, "
                "bfloat16 or float16, or codec=None"
            )


def _check_same_modules(module: nn.Module, *, group: ProcessGroupLike) -> None:
    """ValueError, on every rank, naming the first parameter or buffer in which a rank's module
    differs from rank 0's."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    signature = [
        (
            name,
            tuple(t.shape),
            str(t.dtype).removeprefix("torch."),
            "trained" if t.requires_grad else "fixed",
        )
        for name, t in tensors
    ]
    first, *others = gather(signature, group=group)
    for rank, other in enumerate(others, start=1):
        if other == first:
            continue
        pairs = zip(first, other, strict=False)
        difference = next(
            (f"rank 0 has {a} where rank {rank} has {b}" for a, b in pairs if a != b),
            f"rank 0 has {len(first)} parameters and buffers, rank {rank} has {len(other)}",
        )
        raise ValueError(
            f"the ranks' modules differ: {difference}; build the same module on every rank"
        )


def _check_own_ranks(
    own: Mapping[int, OwnRanks], named: list[tuple[str, nn.Parameter]], **other_ways: bool
) -> None:
    """ValueError for a way of reducing that parameters of a group of their own can't take."""
    for name, p in named:
        for way in (way for way, wanted in other_ways.items() if wanted and id(p) in own):
            raise ValueError(
                f"DataParallel: the gradient of {name} is {own[id(p)]}, others over all "
                f"data-parallel ranks, which {way} does not offer; leave {way} out"
            )


def _begin_alike(
    tensors: Iterable[tuple[torch.Tensor, OwnRanks | None]], *, group: ProcessGroupLike
) -> None:
    """Give each tensor the values that it has on the first of the ranks that hold it. Collective.

    Args:
        tensors: With their ranks; None: those of `group`.
    """
    for tensor, own in tensors:
        broadcast([tensor], group=group if own is None else own.group)


def _symmetric_gradients(
    parts: list[list[tuple[str, nn.Parameter]]], *, group: ProcessGroupLike
) -> list[SymmetricBuffer | None]:
    """Memory for the flat gradient of each of these buffers, which all ranks see; None for a dtype
    that is not summed there. Collective.

    Raises:
        OutOfMemoryError: On every rank alike, where any rank has no room.
    """
    found: list[SymmetricBuffer | None] = []
    try:
        for members in parts:
            like, numel = members[0][1], FlatBuffer.layout_of(members).numel
            found.append(
                symmetric_empty(numel, dtype=like.dtype, device=like.device, group=group)
                if like.dtype in DTYPES and numel
                else None
            )
    except torch.OutOfMemoryError as error:
        _free(found)
        raise torch.OutOfMemoryError(
            f"DataParallel: {error}; with algorithm='auto' gradients lie in ordinary memory"
        ) from None
    return found


def _free(buffers: list[SymmetricBuffer | None]) -> None:
    for buffer in buffers:
        if buffer is not None and not buffer.freed:
            buffer.free(wait=True)


class DataParallel(nn.Module):
    """Wraps `module` so that after backward() every rank holds the mean (or sum) of all ranks'
    gradients.

    Args:
        module: on this rank's device, the same on every rank up to the values: rank 0's are
            broadcast once. A parameter that is not contiguous becomes contiguous.
        group: the ranks that hold replicas; None for the default group (one process where
            torch.distributed is not initialized), pyops.mesh.ALONE for this process alone.
        mesh: a pyops.mesh.Mesh or torch DeviceMesh, in place of `group`: its ranks along
            "dp" and "cp", which hold the same parameters and see other tokens.
        bucket_bytes: how many bytes of gradients are reduced at a time.
        algorithm: as for `pyops.comm.all_reduce`; of no meaning with a codec. "symmetric": the
            gradients lie in symmetric memory, and buckets are reduced where they lie.
        reduction: "mean", or "sum" for a loss that is already divided by the global number of
            samples.
        group_by: (name, parameter) -> key; parameters with different keys lie in different buffers,
            so that an optimizer can treat them differently:
            `AdamW([{"params": [b.parameter], ...} for b in model.flat])`.
        codec: gradients travel compressed, a bucket at a time
            (`pyops.comm.compressed_all_reduce`). What is left out of one step is added to the next
            one's gradient, and belongs into checkpoints: `communication_state()`. One rank alone
            compresses nothing. None: gradients travel as they are.

    Attributes:
        module: the wrapped module; take state_dict() from it.
        flat: the FlatBuffers, one per dtype, device and key of group_by.
        keys: their keys, in the same order.

    Parameters that take part on no rank keep the gradient they had, None for example. Frozen
    parameters and buffers are broadcast once and left alone afterwards. With a mesh, a parameter
    whose placement names fewer axes (`Placement.reduce`) begins with the values of, and is summed
    over, the ranks along these alone; its mean is over all. Clear the gradients between two
    backwards that communicate then.

    Raises:
        ValueError: on every rank alike: the ranks' modules differ in names, shapes, dtypes or
            order, or the options above differ; nothing is trainable; a parameter is on the meta
            device; its placement names axes that are none of data parallelism, or only some of
            these without a mesh, or beside a codec or "symmetric". In backward, the errors of
            pyops.comm name the rank and the bucket.
        TypeError: on every rank alike: no module, no codec, a dtype that the codec can't compress.

    Li et al., PyTorch Distributed, VLDB 2020, section 3.2 (buckets, overlap, no_sync).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: ProcessGroupLike = None,
        mesh: Mesh | DeviceMesh | None = None,
        bucket_bytes: int = 25 << 20,
        algorithm: str = "auto",
        reduction: str = "mean",
        group_by: Callable[[str, nn.Parameter], Hashable] | None = None,
        codec: Codec | None = None,
        **unknown: object,
    ) -> None:
        refuse_renamed("DataParallel", unknown, {"op": "reduction"})
        group = axis_group("DataParallel", ("dp", "cp"), group=group, mesh=mesh)
        ranks = resolve(group, "DataParallel")
        super().__init__()
        with ranks_agree(group):
            named = _trainable(module)
            _check_codec(codec, named)
            check_free(named, who="DataParallel")
            check_grids_apart(module, group, who="DataParallel")
            own = own_ranks(module, mesh, who="DataParallel")
            symmetric = algorithm == "symmetric"
            _check_own_ranks(own, named, codec=codec is not None, symmetric=symmetric)
        _check_same_modules(module, group=group)
        # Backward reaches the last parameter first.
        order = {id(p): i for i, (_, p) in enumerate(reversed(named))}
        sorted_into: dict[tuple[Any, ...], list[tuple[str, nn.Parameter]]] = {}
        for name, p in named:
            key = group_by(name, p) if group_by else None
            axes = own[id(p)].axes if id(p) in own else None
            sorted_into.setdefault((key, p.dtype, p.device, axes), []).append((name, p))
        plan = [
            (
                [name for name, _ in members],
                str(dtype),
                bucket_bytes,
                algorithm,
                reduction,
                codec and codec.name,
                axes,
            )
            for (_, dtype, _, axes), members in sorted_into.items()
        ]
        plans = gather(plan, group=group)
        different = next((rank for rank, other in enumerate(plans) if other != plans[0]), None)
        if different is not None:
            raise ValueError(
                f"rank 0 and rank {different} reduce gradients in different ways; pass "
                "the same group_by, bucket_bytes, algorithm, reduction and codec on every rank"
            )
        self.module, self._group = module, group
        self.keys = [key for key, *_ in sorted_into]
        alone = ranks is None or ranks.size() == 1
        parts = list(sorted_into.values())
        self._shared: list[SymmetricBuffer | None] = [None] * len(parts)
        if symmetric and codec is None and not alone:
            self._shared = _symmetric_gradients(parts, group=group)
        self.flat = [
            FlatBuffer(members, grad=None if shared is None else shared.tensor)
            for members, shared in zip(parts, self._shared, strict=True)
        ]
        ranks_of = [own.get(id(buffer.parameters[0])) for buffer in self.flat]
        _begin_alike(
            (
                *zip((buffer.data for buffer in self.flat), ranks_of, strict=True),
                *((p, own.get(id(p))) for p in module.parameters() if not p.requires_grad),
                *((buffer, None) for buffer in module.buffers()),
            ),
            group=group,
        )
        self.reducer = Reducer(
            self.flat,
            None if alone else Communicator.of(group),
            bucket_bytes=bucket_bytes,
            algorithm=algorithm,
            reduction=reduction,
            positions=[[order[id(p)] for p in buffer.parameters] for buffer in self.flat],
            codec=codec,
        )
        self.reducer.own = {b: each for b, each in enumerate(ranks_of) if each is not None}
        self._in_place: InPlace | None = InPlace("DataParallel", module, self.flat, fix=FIX)
        self.reducer.look = self._in_place.problem
        self.flat[0].parameter.flat_watch.look = self._in_place.problem  # type: ignore[attr-defined]  # before a step
        claim((p for _, p in named), self.reducer, who="DataParallel")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`module(*args, **kwargs)`."""
        looks = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if looks:
            if self._in_place is None:
                raise RuntimeError(
                    "this DataParallel is closed, and gradients would stay those of each "
                    "rank; call its .module, or make a new "
                    "DataParallel of it"
                )
            error = self._in_place.problem()
            if error is not None:
                self.reducer.leave(error)
        self.reducer.prepare(looked=looks)
        return self.module(*args, **kwargs)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward reduces gradients over the ranks; as on torch's DistributedDataParallel,
        and settable.

        False: as within `no_sync()`, until it is set again. An optimizer that communicates by
        itself sets it.
        """
        return self.reducer.synchronizes

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"require_backward_grad_sync is {value!r}; expected True or False")
        self.reducer.synchronizes = value

    def no_sync(self) -> AbstractContextManager[None]:
        """Within the block, backward adds gradients up locally; the next backward outside reduces
        the sum of all."""
        return self.reducer.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. set_to_none=False zeroes the buffers and keeps the views."""
        if set_to_none:
            super().zero_grad(set_to_none=True)
        else:
            for buffer in self.flat:
                buffer.zero_grad()

    def close(self) -> None:
        """Take the hooks off the module, which gets memory of its own, so that it can be moved, or
        go to another wrapper.

        No forward with gradients is possible through it afterwards; call its `module`. A second
        time it does nothing. With algorithm="symmetric" a collective.
        """
        self.reducer.remove()
        release((p for buffer in self.flat for p in buffer.parameters), self.reducer)
        for buffer in self.flat:
            for parameter in buffer.parameters:
                parameter.grad = None
                parameter.data = parameter.data.clone()
            buffer.parameter.grad = None
        _free(self._shared)
        self.flat, self.reducer.buffers, self._in_place, self.reducer.look = [], [], None, None

    def communication_state(self) -> dict[str, Any]:
        """The errors of compression: {"codec": name, "worker": {parameter: Shard}, ...}; {} without
        a codec, or alone.

        `pyops.checkpoint.save` writes all ranks' shards as one; put it into `state`, not `own`. It
        shares memory with the errors in use: save or copy it before the next backward.
        """
        return self.reducer.communication_state()

    def load_communication_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `communication_state` gave, or a checkpoint of it: of any number of ranks,
        and any buckets.

        Errors of another number of ranks are shared out so that what they add to the gradient is
        the same.

        Raises:
            ValueError: On every rank and before anything is changed, for the state of another codec
                (naming both) or of another model.
        """
        with ranks_agree(self._group):
            self.reducer.check_communication_state(state)
        self.reducer.load_communication_state(state)
