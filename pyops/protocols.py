"""Types that several subpackages share, so that none imports another for a name alone.

A `Protocol` here names attributes that one subpackage sets on an object of torch and another reads:

| attribute | on | set by | read by |
|---|---|---|---|
| `placements` | modules | layers of models and tensor_parallel | flat, zero, hub, checkpoint |
| `grid` | modules | layers of tensor_parallel.grids | strategies of data parallelism |
| `flat_layout` | parameters | flat.FlatBuffer | optimizers that go by layers, onebit |
| `part_of` | parameters | zero | optim.Adafactor |
| `main_grad` | parameters | the user, zero | deferred, pipeline, elastic |
| `deferred` | parameters | deferred.Deferred | linear layers |
| `pruning_masks` | parameters | pruning.Masks | pruning, elastic |
| `reduce_norms`, `reduce_sums`, `whole_states` | optimizers | optim, zero | optim, zero |
| `over_shards`, `num_ranks` | optimizer classes | onebit | zero |
| `stepped_tensors`, `publish_stepped` | optimizers | zero | local_sgd |
| `all_reduce`, `memory`, `check_memory` | codecs | comm.PowerSGD | comm, onebit, zero |

Where a protocol is asked for each layer of each step, `hasattr` asks instead: that is faster, and
torch.compile follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

__all__ = [
    "CollectiveCodec",
    "CommunicatingOptimizer",
    "DeferredParameter",
    "FlatParameter",
    "HasPlacements",
    "MainGradParameter",
    "NormReducingOptimizer",
    "ParamGroup",
    "PartialParameter",
    "PrunedParameter",
    "RankGrid",
    "ShardableOptimizer",
    "SteppedTensorsOptimizer",
    "SumReducingOptimizer",
]

ParamGroup: TypeAlias = dict[str, Any]
"""An entry of `torch.optim.Optimizer.param_groups`: "params", a list of tensors, and options."""


@runtime_checkable
class HasPlacements(Protocol):
    """A module whose own parameters, or some of them, are parts of larger tensors."""

    placements: Mapping[str, Any]
    """Name of a parameter within the module -> its pyops.flat.Placement."""


@runtime_checkable
class RankGrid(Protocol):
    """A module's attribute `grid` where its input, output and parameters are cut over a grid of
    ranks: a pyops.tensor_parallel.grids.Grid. Modules of images have a `grid` of patches."""

    mode: str
    """How many dimensions it has."""
    shape: tuple[int, ...]
    """Ranks along each."""
    ranks: Any
    """All of them: a pyops.tensor_parallel.Ranks."""


@runtime_checkable
class FlatParameter(Protocol):
    """A parameter of one dimension that holds several tensors end to end."""

    flat_layout: Any
    """The pyops.flat.FlatLayout that says which."""


@runtime_checkable
class PartialParameter(Protocol):
    """A parameter of one dimension that is a range of a flattened tensor."""

    part_of: Any
    """The tensor's shape and where the range begins (pyops.optim.adafactor.parts.TensorPart)."""


@runtime_checkable
class MainGradParameter(Protocol):
    """A parameter whose gradient is summed in a wider dtype, beside `.grad`, as in Megatron-LM."""

    main_grad: Tensor
    """The sum: of the parameter's shape, float32 or float64."""


@runtime_checkable
class DeferredParameter(Protocol):
    """A weight whose gradient is computed later than that of the layer's input."""

    deferred: Any
    """The queue that computes it, a pyops.deferred.Deferred."""


@runtime_checkable
class PrunedParameter(Protocol):
    """A parameter some of whose weights are pruned, and are to stay 0."""

    pruning_masks: Any
    """What says which: a pyops.pruning.Masks."""


@runtime_checkable
class NormReducingOptimizer(Protocol):
    """An optimizer that needs norms of whole layers and may be given parts of them."""

    reduce_norms: Callable[[Tensor], Tensor] | None
    """Squared norms of this process's parts -> those of the whole layers; None: they are whole."""


@runtime_checkable
class SumReducingOptimizer(Protocol):
    """An optimizer that sums over rows and columns of tensors and may be given parts of them."""

    reduce_sums: Callable[[Tensor], Tensor] | None
    """Float64 sums of this process's parts -> those of the whole tensors, in place; None: they are
    whole."""

    whole_states: Sequence[str]
    """The states that every process has whole, by their keys."""


@runtime_checkable
class SteppedTensorsOptimizer(Protocol):
    """An optimizer over several ranks, of which each steps a part of the parameters."""

    def stepped_tensors(self) -> list[tuple[str, Tensor, Tensor | None]]:
        """What this rank steps: the name of the parameter, the flat part of it or its fp32 master,
        and the part of the parameter that is rounded from the master, or None."""

    def publish_stepped(self) -> None:
        """Bring to all its ranks what was written into the tensors of `stepped_tensors`."""


@runtime_checkable
class ShardableOptimizer(Protocol):
    """An optimizer class that communicates compressed, and that ZeroOptimizer can shard at stage
    1."""

    def over_shards(self, arguments: Mapping[str, Any]) -> Any:
        """Its phases, given the arguments of its constructor."""


@runtime_checkable
class CommunicatingOptimizer(Protocol):
    """An optimizer that all-reduces by itself: DataParallel must leave its gradients alone."""

    @property
    def num_ranks(self) -> int:
        """How many ranks it steps together with."""


@runtime_checkable
class CollectiveCodec(Protocol):
    """A codec that needs whole tensors and so runs the all-reduce itself, such as PowerSGD; any
    other codec encodes pieces, which the collective sends."""

    @property
    def memory(self) -> Callable[..., Any]:
        """Makes the memory of what was left out: memory(layout, codec=, rank=, size=, device=)."""

    def all_reduce(self, flat: Tensor, *, error: Any, transport: Any, scale: float) -> None:
        """flat = scale * (the sum of flat + error over the ranks), in place.

        Args:
            flat: [n], contiguous.
            error: a memory that `check_memory` accepts.
            transport: pyops.comm.collectives.transport.Transport.
            scale: 1 / ranks for a mean.
        """

    def check_memory(self, error: Any, *, numel: int, rank: int, size: int) -> None:
        """ValueError unless `error` is a memory of this codec and rank for so many numbers."""
