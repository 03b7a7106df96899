"""hold: pruned weights stay 0, to the bit, while a model is trained.

    backward --buckets--> sum over ranks --> [ mask ] --> norm, clipping --> optimizer --> weights
                                                ^ once, on the flat gradient

At pruning, weights, moments and masters are set to 0; from then on the gradient alone is masked,
and no optimizer needs to know. Where the mask is applied depends on who has the gradient: the
buckets of DataParallel, the chunks of ZeroOptimizer, or each parameter by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.agreement import ranks_agree
from pyops.comm.buckets.reducer import Reducer
from pyops.flat import FlatLayout, owner_of
from pyops.ops.sparse.radix_count import keep_bits_
from pyops.pruning.masks import Masks, pack_bits
from pyops.pruning.training.states import check_optimizer, keep, keep_states
from pyops.zero import ZeroOptimizer

__all__ = ["Hold", "hold"]


def hold(masks: Masks, optimizer: torch.optim.Optimizer) -> Hold:
    """Keep pruned weights at 0 while `optimizer` trains the model of `masks`.

    Gradients are masked after they are summed over the ranks and before they are clipped or
    stepped. Now, and when the masks change, weights and states of what is pruned are set to 0.

    Args:
        masks: Of the model; call `Masks.update` to change them, on all ranks alike.
        optimizer: An optimizer of pyops.optim or torch.optim over the model's parameters, or over
            the flat ones of a `DataParallel`; or a `ZeroOptimizer` of any stage.

    Returns:
        What ends it: a context manager, or `close()`.

    Raises:
        TypeError: For an optimizer that sends signs, such as OneBitAdam.
        ValueError: For an eps of 0, parameters that another optimizer has, and
            ZeroOptimizer(symmetric_step=True), whose kernel sums gradients and steps at once.
    """
    return Hold(masks, optimizer)


class Hold:
    """See `hold`.

    Attributes:
        masks: What is held.
        optimizer: What trains.
    """

    def __init__(self, masks: Masks, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(masks, Masks):
            raise TypeError(
                f"masks is a {type(masks).__name__}; give the Masks of the model, as magnitude or "
                "nm_masks return them"
            )
        self.masks, self.optimizer = masks, optimizer
        self._ends: list[Callable[[], None]] = []
        self._at: _OverParameters | _OverBuckets | _OverChunks
        if isinstance(optimizer, ZeroOptimizer):
            with ranks_agree(optimizer.group):
                _check_zero(optimizer)
                check_optimizer(optimizer.owned.optimizer)
            self._at = _OverChunks(masks, optimizer)
        else:
            check_optimizer(optimizer)
            reducers = _reducers_of(masks)
            self._at = (
                _OverBuckets(masks, optimizer, reducers)
                if reducers
                else _OverParameters(masks, optimizer)
            )
        self._ends += [masks.observe(self._changed), self._at.close]
        masks.apply_()
        self._changed()

    def _changed(self) -> None:
        """Take up the masks as they are now."""
        self._at.changed()

    def close(self) -> None:
        """Mask gradients no longer. A second time it does nothing."""
        for end in self._ends:
            end()
        self._ends.clear()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OverParameters:
    """Each parameter's gradient by itself, when backward has added to it."""

    def __init__(self, masks: Masks, optimizer: torch.optim.Optimizer) -> None:
        self._masks, self._optimizer = masks, optimizer
        stepped = _stepped(optimizer)
        for name in masks:
            if id(masks.parameter(name)) not in stepped:
                raise ValueError(
                    f"{name} has a mask, but is no parameter of this "
                    f"{type(optimizer).__name__}; give the optimizer that trains it"
                )
        self._bits: dict[str, Tensor] = {}
        self._hooks = [
            masks.parameter(name).register_post_accumulate_grad_hook(self._mask_of(name))
            for name in masks
        ]

    def _mask_of(self, name: str) -> Callable[[Tensor], None]:
        def mask(parameter: Tensor) -> None:
            if parameter.grad is not None:
                keep(parameter.grad, self._bits[name])

        return mask

    def changed(self) -> None:
        for name, mask in self._masks.items():
            parameter = self._masks.parameter(name)
            self._bits[name] = mask.bits.to(parameter.device)
            keep_states(self._optimizer.state.get(parameter, {}), parameter, self._bits[name])
            if parameter.grad is not None:
                keep(parameter.grad, self._bits[name])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _OverBuckets:
    """The flat gradients of DataParallel, when a bucket is summed."""

    def __init__(
        self, masks: Masks, optimizer: torch.optim.Optimizer, reducers: Sequence[Reducer]
    ) -> None:
        self._masks, self._optimizer, self._reducers = masks, optimizer, reducers
        self._check()
        self._parts: list[list[tuple[list[Tensor], list[Tensor]]]] = []
        for number, reducer in enumerate(reducers):
            reducer.epilogue = self._epilogue_of(number)

    def _epilogue_of(self, number: int) -> Callable[[int], None]:
        def epilogue(bucket: int) -> None:
            gradients, bits = self._parts[number][bucket]
            if gradients:
                keep_bits_(gradients, bits)

        return epilogue

    def _check(self) -> None:
        stepped = _stepped(self._optimizer)
        for reducer in self._reducers:
            if reducer.epilogue is not None:
                raise ValueError("another hold masks the gradients of this DataParallel; close it")
            for buffer in reducer.buffers:
                own = {id(buffer.parameter), *map(id, buffer.parameters)}
                if not own & stepped:
                    raise ValueError(
                        f"{buffer.names[0]} is in a DataParallel, but this "
                        f"{type(self._optimizer).__name__} has neither it nor the flat parameter "
                        "(model.flat[i].parameter); give the optimizer that trains it"
                    )

    def changed(self) -> None:
        self._parts = [self._parts_of(reducer) for reducer in self._reducers]
        for reducer in self._reducers:
            reducer.send_only(
                [
                    {
                        index: self._masks[name].alive().view(-1).to(buffer.grad.device)
                        for name, _, index in _indices(self._masks, buffer)
                    }
                    for buffer in reducer.buffers
                ]
            )
        stepped = _stepped(self._optimizer)
        for reducer in self._reducers:
            for buffer in reducer.buffers:
                if id(buffer.parameter) in stepped:
                    bits = _flat_bits(self._masks, buffer.layout, buffer.parameters)
                    state = self._optimizer.state.get(buffer.parameter, {})
                    keep_states(state, buffer.parameter, bits.to(buffer.data.device))
                for name, parameter, where in _masked(self._masks, buffer):
                    bits = self._masks[name].bits.to(buffer.data.device)
                    keep_states(self._optimizer.state.get(parameter, {}), parameter, bits)
                    keep(buffer.grad[where], bits)

    def _parts_of(self, reducer: Reducer) -> list[tuple[list[Tensor], list[Tensor]]]:
        found = []
        of_buffer = [
            {index: name for name, _, index in _indices(self._masks, buffer)}
            for buffer in reducer.buffers
        ]
        for bucket in reducer.buckets:
            buffer = reducer.buffers[bucket.buffer]
            masked = [i for i in bucket.parameters if i in of_buffer[bucket.buffer]]
            gradients = [buffer.grad[buffer.layout.slice_at(i)] for i in masked]
            names = [of_buffer[bucket.buffer][i] for i in masked]
            found.append((gradients, [self._masks[n].bits.to(buffer.grad.device) for n in names]))
        return found

    def close(self) -> None:
        for reducer in self._reducers:
            reducer.epilogue = None
            if reducer.buffers:
                reducer.send_only(None)


class _OverChunks:
    """The chunks of ZeroOptimizer's gradients, when a bucket is reduce-scattered."""

    def __init__(self, masks: Masks, optimizer: ZeroOptimizer) -> None:
        self._masks, self._optimizer = masks, optimizer
        names = {id(masks.parameter(name)): name for name in masks}
        trained = {id(p) for flat in optimizer.flats for p in flat.parameters}
        for number, name in names.items():
            if number not in trained:
                raise ValueError(
                    f"{name} has a mask, but is no parameter of this ZeroOptimizer; give the "
                    "optimizer that trains it"
                )
        if any(bucket.epilogue is not None for bucket in optimizer.gradients.buckets):
            raise ValueError("another hold masks the gradients of this ZeroOptimizer; close it")
        self._parts: dict[tuple[int, int], list[tuple[slice, Tensor]]] = {}
        self._names = names
        for f, buckets in enumerate(optimizer.gradients.of_flat):
            for number, bucket in enumerate(buckets):
                bucket.epilogue = self._epilogue_of((f, number))

    def _epilogue_of(self, key: tuple[int, int]) -> Callable[[Tensor], None]:
        def epilogue(chunk: Tensor) -> None:
            parts = self._parts.get(key)
            if parts:
                keep_bits_([chunk[where] for where, _ in parts], [bits for _, bits in parts])

        return epilogue

    @torch.no_grad()
    def changed(self) -> None:
        optimizer = self._optimizer
        if optimizer.delayed is not None:
            optimizer.delayed.wait()
        self._parts.clear()
        for each in optimizer.owned.all_pieces():
            flat, piece = optimizer.flats[each.flat], each.piece
            name = self._names.get(id(flat.parameters[piece.index]))
            if name is None or not piece.numel:
                continue
            part = self._masks[name].part(piece.of_tensor.start, piece.of_tensor.stop)
            bits = part.to(flat.device)
            self._parts.setdefault((each.flat, piece.bucket), []).append((piece.of_chunk, bits))
            for tensor in {id(t): t for t in (each.tensor, each.result)}.values():
                keep(tensor, bits)
            self._keep_states(each.parameter, bits)
        for f, buckets in enumerate(optimizer.gradients.of_flat):
            for number, bucket in enumerate(buckets):
                if bucket.chunk is not None:
                    self._epilogue_of((f, number))(bucket.chunk)

    def _keep_states(self, parameter: nn.Parameter, bits: Tensor) -> None:
        owned = self._optimizer.owned
        if owned.offloaded is None:
            keep(parameter.data, bits)
            keep_states(owned.optimizer.state.get(parameter, {}), parameter, bits)
            return
        states = owned.offloaded.read(parameter)
        if states:
            keep_states(states, parameter, bits)
            owned.offloaded.write(parameter, states)

    def close(self) -> None:
        if not self._optimizer.closed:
            for bucket in self._optimizer.gradients.buckets:
                bucket.epilogue = None


def _check_zero(optimizer: ZeroOptimizer) -> None:
    if optimizer.symmetric is not None:
        raise ValueError(
            "ZeroOptimizer(symmetric_step=True) sums gradients and steps in one kernel, which "
            "knows no mask; make it without symmetric_step"
        )
    if optimizer.one_bit is not None:
        raise TypeError(
            "ZeroOptimizer over a 1-bit optimizer sends signs, and a sign can't say 0: pruned "
            "weights would move; use pyops.optim.AdamW"
        )
    if any(getattr(flat, "region", None) is not None for flat in optimizer.flats):
        raise ValueError(
            "parameters in files (stage 3 with a folder) can't be masked; offload states alone, "
            "or use device memory"
        )


def _stepped(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _reducers_of(masks: Masks) -> list[Reducer]:
    """Those of the DataParallels that have the masked parameters; none where nobody has."""
    found: dict[int, Reducer] = {}
    free: list[str] = []
    for name in masks:
        owner = owner_of(masks.parameter(name))
        if isinstance(owner, Reducer):
            found[id(owner)] = owner
        elif owner is None:
            free.append(name)
        else:
            raise ValueError(
                f"{name} belongs to another optimizer's flat tensors; give that optimizer to hold()"
            )
    if found and free:
        raise ValueError(
            f"{free[0]} is in no DataParallel, others are; hold them by masks of their own"
        )
    return list(found.values())


def _indices(masks: Masks, buffer: Any) -> Iterator[tuple[str, nn.Parameter, int]]:
    numbers = {id(p): i for i, p in enumerate(buffer.parameters)}
    for name in masks:
        index = numbers.get(id(masks.parameter(name)))
        if index is not None:
            yield name, masks.parameter(name), index


def _masked(masks: Masks, buffer: Any) -> Iterator[tuple[str, nn.Parameter, slice]]:
    for name, parameter, index in _indices(masks, buffer):
        yield name, parameter, buffer.layout.slice_at(index)


def _flat_bits(masks: Masks, layout: FlatLayout, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Bits of a whole flat buffer: everything but pruned weights is kept."""
    alive = torch.ones(layout.numel, dtype=torch.bool, device="cpu")
    names: Mapping[int, str] = {id(masks.parameter(name)): name for name in masks}
    for index, parameter in enumerate(parameters):
        name = names.get(id(parameter))
        if name is not None:
            alive[layout.slice_at(index)] = masks[name].alive().view(-1).cpu()
    return pack_bits(alive)
