"""Random numbers that depend on (seed, name, place) alone: a shard draws exactly its part of the
whole.

    whole = normal(seed, "wte", (8, 6))                                     o o o o o o
    shard = normal(seed, "wte", (4, 3),                                     o o o o o o
                   offset=(4, 3), global_shape=(8, 6))                      o o o x x x
    torch.equal(shard, whole[4:, 3:])                                       o o o x x x

Initialization and dropout are therefore the same on any layout of ranks, and the same bits on CPU
and CUDA. The generator is Philox4x32-10 (Salmon et al., SC 2011) with a 64-bit key hashed from seed
and name, and the global index as its counter. No function here has state: the same call gives the
same numbers. `RandomStates` is for layers that draw from torch's own generators.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.ops import random as kernels
from pyops.renamed import refuse_renamed

__all__ = [
    "RandomStates",
    "dropout_mask",
    "key_of",
    "normal",
    "states_of",
    "uniform",
    "with_states",
]

Offset = int | Sequence[int]


def key_of(seed: int, name: str) -> int:
    """The 64-bit key of the stream `name` under `seed`: the first 8 bytes of BLAKE2b over both."""
    return int.from_bytes(
        hashlib.blake2b(f"{int(seed)}/{name}".encode(), digest_size=8).digest(), "little"
    )


def uniform(
    seed: int,
    name: str,
    shape: Sequence[int],
    *,
    offset: Offset = 0,
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Uniform numbers on [0, 1) in steps of 2^-24, of `shape`, cast to `dtype` at the end.

    Args:
        offset: Where the result stands in the whole. A number counts elements of the flattened
            whole; a sequence gives the start in each dimension of `global_shape`.

    Raises:
        ValueError: When the result would reach outside `global_shape`.
    """
    out = torch.empty(tuple(shape), dtype=torch.float32, device=device)
    key = key_of(seed, name)
    _fill(
        out,
        offset,
        global_shape,
        lambda part, place: kernels.philox_uniform_(part, key=key, **place),
    )
    return out.to(dtype)


def normal(
    seed: int,
    name: str,
    shape: Sequence[int],
    *,
    std: float = 1.0,
    offset: Offset = 0,
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    **renamed: object,
) -> Tensor:
    """Normal numbers with mean 0 and standard deviation `std`; the rest as in `uniform`.

    Args:
        seed, name, shape, offset, global_shape, dtype, device: As for `uniform`.
        std: The standard deviation, 0 or more.
    """
    refuse_renamed("normal", renamed, {"mean": "normal(...).add_(mean)"})
    if not std >= 0:
        raise ValueError(f"std must be a number >= 0, got {std}")
    out = torch.empty(tuple(shape), dtype=torch.float32, device=device)
    key = key_of(seed, name)
    _fill(
        out,
        offset,
        global_shape,
        lambda part, place: kernels.philox_normal_(part, key=key, **place),
    )
    if std != 1.0:
        out.mul_(std)
    return out.to(dtype)


def dropout_mask(
    seed: int,
    name: str,
    shape: Sequence[int],
    *,
    p: float,
    offset: Offset = 0,
    global_shape: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """A bool mask that keeps (True) each element with probability 1 - p; the rest as in
    `uniform`.

    Args:
        seed, name, shape, offset, global_shape, device: As for `uniform`.
        p: The probability of an element to be dropped, from 0 to 1.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be a probability in [0, 1], got {p}")
    out = torch.empty(tuple(shape), dtype=torch.bool, device=device)
    key = key_of(seed, name)
    _fill(
        out,
        offset,
        global_shape,
        lambda part, place: kernels.philox_dropout_mask_(part, p=p, key=key, **place),
    )
    return out


class RandomStates:
    """The states of torch's global generators when this object was made: of the CPU, and of CUDA
    devices.

    Args:
        cuda_devices: the indices of the CUDA devices; None: all there are.
    """

    def __init__(self, cuda_devices: Iterable[int] | None = None) -> None:
        if cuda_devices is None:
            cuda_devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        self.devices = sorted(set(cuda_devices))
        self.cpu = torch.get_rng_state()
        self.cuda = [torch.cuda.get_rng_state(device) for device in self.devices]

    def restore(self) -> None:
        """Set the generators to these states again."""
        torch.set_rng_state(self.cpu)
        for device, state in zip(self.devices, self.cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within, the generators have these states; afterwards those that they had before."""
        with torch.random.fork_rng(self.devices):
            self.restore()
            yield


def states_of(module: nn.Module) -> list[tuple[nn.Module, Any]]:
    """(module, state) of every module in `module` that is given the state of its dropout before
    each forward (`set_dropout_state`)."""
    return [(each, each.state) for each in module.modules() if hasattr(each, "set_dropout_state")]


@contextlib.contextmanager
def with_states(states: Sequence[tuple[nn.Module, Any]]) -> Iterator[None]:
    """The modules with these states, for a forward that must draw what an earlier one drew;
    afterwards as before."""
    now = [(module, module.state) for module, _ in states]
    try:
        for module, state in states:
            module.state = state
        yield
    finally:
        for module, state in now:
            module.state = state


def _fill(
    out: Tensor,
    offset: Offset,
    global_shape: Sequence[int] | None,
    draw: Callable[[Tensor, dict[str, int]], None],
) -> None:
    """Call draw(part, place) on contiguous parts of `out`, with each part's place in the whole."""
    start, sizes, strides = _place_in_whole(tuple(out.shape), offset, global_shape)
    if out.numel() == 0:
        return
    # A kernel call takes rows of one length at one distance; dimensions before those are walked
    # here.
    rows, row = ([1, 1, *sizes])[-2:]
    row_stride = ([0, 0, *strides])[-2]
    flat = out.view(-1, rows * row)
    leading = itertools.product(*(range(n) for n in sizes[:-2]))
    for part, position in zip(flat, leading, strict=True):
        first = start + sum(i * s for i, s in zip(position, strides, strict=False))
        draw(part, {"offset": first, "row": row, "row_stride": row_stride if rows > 1 else row})


def _place_in_whole(
    shape: tuple[int, ...], offset: Offset, global_shape: Sequence[int] | None
) -> tuple[int, list[int], list[int]]:
    """Flat start of the slice, and its sizes and strides in the whole with dimensions merged where
    nothing lies between."""
    whole = shape if global_shape is None else tuple(global_shape)
    if isinstance(offset, int):
        if len(shape) != 1 and shape != whole:
            raise ValueError(
                f"shape {shape} in global_shape {whole} needs an offset for each "
                f"dimension, got the number {offset}"
            )
        room = math.inf if global_shape is None else math.prod(whole)
        if offset < 0 or offset + math.prod(shape) > room:
            raise ValueError(
                f"offset {offset} and shape {shape} reach outside a whole of {room} elements"
            )
        return offset, [math.prod(shape)], [1]
    starts = tuple(offset)
    if global_shape is None or not len(starts) == len(whole) == len(shape):
        raise ValueError(
            "an offset per dimension needs global_shape, all of one length; got shape "
            f"{shape}, offset {starts}, "
            f"global_shape {global_shape}"
        )
    if any(o < 0 or o + n > g for n, o, g in zip(shape, starts, whole, strict=True)):
        raise ValueError(f"shape {shape} at offset {starts} reaches outside global_shape {whole}")
    strides = [math.prod(whole[d + 1 :]) for d in range(len(whole))]
    first = sum(o * s for o, s in zip(starts, strides, strict=True))
    sizes_merged: list[int] = []
    strides_merged: list[int] = []
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        if sizes_merged and s == sizes_merged[0] * strides_merged[0]:
            sizes_merged[0] *= n
        else:
            sizes_merged.insert(0, n)
            strides_merged.insert(0, s)
    return first, sizes_merged, strides_merged
