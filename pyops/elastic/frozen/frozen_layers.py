"""FrozenLayers: the frozen layers as one layer of a pipeline, its first; computed alike whatever
the
batch, or read from the cache.

    samples     7  2  9  4  0   a micro-batch
    cache       .  2  1  .  2   the depth at which each is there; this prefix has 2 layers
    read           x        x
    layers[1:]        x         goes on from what is there
    layers      x        x      ... all of them in chunks of one fixed number of rows, the last one
                                filled up
    kept        x     x  x      for the next epoch

A matrix product of more rows may add in another order, so a sample's bits would depend on the batch
that it comes in. Chunks of one size prevent that: a run that reads has the bits of a run that
computes, however either cuts its batches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from pyops import random
from pyops.comm.agreement import gather_numbers
from pyops.elastic.frozen.activation_cache import ActivationCache
from pyops.elastic.layout.padded_batch import PADDING, indices_of
from pyops.mesh import ALONE, ProcessGroupLike
from pyops.pipeline.runtime.microbatch import num_rows
from pyops.pipeline.runtime.stage import named_arguments

__all__ = ["FrozenLayers"]

logger = logging.getLogger("pyops")


class FrozenLayers(nn.Module):
    """`layers`, frozen: in evaluation, without gradients. The output is one tensor [n, ...], the
    same number of values for all samples.

    seed: of the augmentation that made the inputs, to be set before each epoch that changes it; 0
    where there is none.

    Args:
        layers: From the model's first; their parameters get no gradients from now on, shared ones
            too (a head that is tied to the embedding). What one returns the next takes, a tuple as
            several arguments.
        cache: What they say to samples that are numbered is read from there, and kept there;
            `prefix.cache = None` ends that. When reading or keeping fails for want of memory or
            disk, or of a disk, it ends by itself, said once.
        chunk: Rows that are computed at a time. At the first forward it is halved until a sample's
            bits are found to depend neither on its place nor on the others, at the latest at 1.
        group: Of the ranks that share out the tokens of each row and compute a chunk together: it
            has the same number of rows on all. By default each row is whole on this rank.
        stored: A dtype to which the output of each layer is rounded, and back; that of the cache by
            default. A cache of 16 bits is then of a run whose frozen layers are rounded: the bits
            are no longer those without it, but still the same whether they are read, gone on from
            or computed, now or after a restart.

    Raises:
        ValueError: For no layers, a chunk below 1 and a cache that rounds otherwise than `stored`.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        *,
        cache: ActivationCache | None = None,
        chunk: int = 8,
        stored: torch.dtype | None = None,
        group: ProcessGroupLike = ALONE,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        if not len(self.layers):
            raise ValueError(
                "a prefix of no layers computes nothing; leave it out where nothing is frozen"
            )
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise ValueError(f"chunk is {chunk!r}; it must be a whole number, 1 or more")
        if cache is not None and stored not in (None, cache.stored):
            raise ValueError(
                f"stored is {stored}, but the cache keeps {cache.stored}; give one of them"
            )
        self.cache, self.chunk, self.seed = cache, chunk, 0
        self._group = group
        self.stored = cache.stored if cache is not None else stored
        self._names = [named_arguments(layer) for layer in self.layers]
        self.named_arguments = frozenset({"samples"}).union(*self._names)  # for Pipeline
        self._verified = chunk == 1
        self.requires_grad_(False)
        self.eval()

    @property
    def depth(self) -> int:
        """How many layers, which is the depth of what it keeps."""
        return len(self.layers)

    def train(self, mode: bool = True) -> FrozenLayers:
        """Stays in evaluation: a frozen layer drops nothing out."""
        return super().train(False)

    @property
    def key(self) -> int:
        """The cache's seed for the augmentation's, and for the chunk: what was computed in others
        may have other bits."""
        return random.key_of(self.seed, f"chunks of {self.chunk}") - (1 << 63)

    @torch.no_grad()
    def forward(self, *inputs: Any, samples: Tensor | None = None, **named: Any) -> Tensor:
        """The last layer's output for each row, [n, ...].

        Args:
            inputs: Of the first layer, tensors [n, ...].
            named: Arguments that layers name: tensors [n, ...] go by rows, others whole, and
                `shape` (rows, ...) with the rows of a chunk.
            samples: [n] int64, the number of each row in the cache; PADDING gets zeros. None:
                nothing is read or kept.
        """
        rows = num_rows(inputs)
        if not rows:
            raise ValueError(
                "the frozen layers were given no rows; give tensors [n, ...] with n of 1 or more"
            )
        if samples is not None and tuple(samples.shape) != (rows,):
            raise ValueError(
                f"samples are {tuple(samples.shape)}, but the batch has {rows} rows; "
                "give the number of each row"
            )
        batch = FrozenInputs(inputs, named, rows)
        self._verify(batch)
        out: Tensor | None = None
        for depth, places in self._found(samples, rows):
            values = self._values(batch, samples, places, depth)
            out = values.new_zeros(rows, *values.shape[1:]) if out is None else out
            out[places.to(out.device)] = values
        if out is None:  # padding alone: computed for its shape
            out = torch.zeros_like(
                self._computed(batch, torch.zeros(rows, dtype=torch.int64, device="cpu"))
            )
        return out

    def prefetch(self, samples: Tensor) -> None:
        """Begin to read what is on disk of samples [n] int64, those of the next batch, while this
        one is computed."""
        if self.cache is not None:
            samples = samples.to("cpu", torch.int64)
            self.cache.prefetch(samples[samples != PADDING], seed=self.key)

    def _found(self, samples: Tensor | None, rows: int) -> list[tuple[int, Tensor]]:
        """(depth, which rows) of those that begin with what is there at that depth, 0: with the
        inputs; none of padding."""
        if samples is None:
            return [(0, torch.arange(rows, device="cpu"))]
        samples = samples.to("cpu", torch.int64)
        _, padding = indices_of(samples)
        depths = torch.where(padding, -1, 0)
        if self.cache is not None:
            there = self.cache.depths(samples[~padding], seed=self.key)
            usable = (there > 0) & (there <= self.depth)
            depths[~padding] = torch.where(usable, there, 0)
        return [
            (depth, (depths == depth).nonzero().flatten())
            for depth in depths.unique().tolist()
            if depth >= 0
        ]

    def _values(
        self, batch: FrozenInputs, samples: Tensor | None, places: Tensor, depth: int
    ) -> Tensor:
        """Of those rows, which are there at that depth."""
        x = self._read(samples, places, depth) if depth else None
        if x is not None:
            x = x.to(batch.device)
        if x is not None and depth == self.depth:
            return x
        values = self._computed(batch, places, x, depth if x is not None else 0)
        self._keep(samples, places, values)
        return values

    def _read(self, samples: Tensor | None, places: Tensor, depth: int) -> Tensor | None:
        """None where it is gone meanwhile, or can't be read."""
        if samples is None or self.cache is None:
            return None
        try:
            values, found = self.cache.get(
                samples.to("cpu", torch.int64)[places], depth=depth, seed=self.key
            )
        except (OSError, MemoryError) as error:
            self.detach_cache(error)
            return None
        return values if bool(found.all()) else None

    def _keep(self, samples: Tensor | None, places: Tensor, values: Tensor) -> None:
        if samples is None or self.cache is None:
            return
        try:
            self.cache.put(
                samples.to("cpu", torch.int64)[places], values, depth=self.depth, seed=self.key
            )
        except (OSError, MemoryError) as error:
            self.detach_cache(error)

    def detach_cache(self, error: Exception) -> None:
        """Go on without the cache in this process, and say why."""
        if self.cache is not None:
            self.cache.close()  # no other prefix has to find out
        self.cache = None
        logger.warning(
            "the cache of frozen layers is off, and training goes on without it: %s", error
        )

    def _computed(
        self, batch: FrozenInputs, places: Tensor, x: Tensor | None = None, depth: int = 0
    ) -> Tensor:
        """layers[depth:] of those rows of the batch, or of x, which has a row for each: in chunks,
        the last one filled up."""
        parts: list[Tensor] = []
        for begin in range(0, len(places), self.chunk):
            chosen = torch.arange(begin, begin + self.chunk, device="cpu").clamp_(
                max=len(places) - 1
            )
            inputs, named = batch.chunk(places[chosen])
            y = self._called(inputs if x is None else (x[chosen.to(x.device)],), named, depth)
            parts.append(y[: len(places) - begin])
        return torch.cat(parts)

    def _called(self, x: Any, named: dict[str, Any], depth: int) -> Tensor:
        for layer, names in zip(self.layers[depth:], self._names[depth:], strict=True):
            some = {name: value for name, value in named.items() if name in names}
            x = layer(*x, **some) if type(x) is tuple else layer(x, **some)
            if self.stored is not None:
                x = tree_map(self._rounded, x)
        if not isinstance(x, Tensor):
            raise TypeError(
                f"the last frozen layer returned a {type(x).__name__}; freeze up to one "
                "that returns one tensor"
            )
        return x

    def _rounded(self, x: Any) -> Any:
        return (
            x.to(self.stored).to(x.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        )

    def _verify(self, batch: FrozenInputs) -> None:
        """Smaller chunks, until one sample's bits are the same at every place, and every sample's
        whoever the others are."""
        while not self._verified:
            rows = torch.arange(self.chunk, device="cpu") % batch.rows
            straight, turned = (self._computed(batch, each) for each in (rows, rows.flip(0)))
            same = self._computed(batch, torch.zeros_like(rows))
            alike = torch.equal(straight, turned.flip(0)) and torch.equal(
                same, straight[:1].expand_as(same)
            )
            told = gather_numbers([float(alike)], device=straight.device, group=self._group)
            if all(of_rank == [1.0] for of_rank in told):
                self._verified = True
                break
            self.chunk //= 2
            self._verified = self.chunk == 1


class FrozenInputs(NamedTuple):
    """What a forward was given."""

    inputs: tuple[Any, ...]
    named: dict[str, Any]
    rows: int

    @property
    def device(self) -> torch.device:
        return next(
            leaf.device for leaf in tree_flatten(self.inputs)[0] if isinstance(leaf, Tensor)
        )

    def chunk(self, places: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs and named arguments of those rows alone, in memory of their own."""

        def taken(leaf: Any) -> Any:
            by_rows = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self.rows
            return leaf[places.to(leaf.device)] if by_rows else leaf

        named = {name: tree_map(taken, value) for name, value in self.named.items()}
        if named.get("shape") is not None:
            named["shape"] = (len(places), *named["shape"][1:])
        return tree_map(taken, self.inputs), named
