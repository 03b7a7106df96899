"""The bytes that one rank keeps from step to step, by what they are for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from pyops.zero.hooks.sharded_gradients import ShardedGradients
from pyops.zero.hooks.sharded_unit import ShardedUnit
from pyops.zero.update.sharded_optimizer_state import ShardedOptimizerState

__all__ = ["kept_bytes"]


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """{address: bytes} of the storages of the tensors among `tensors`, each once; those without
    memory left out."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes():
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


def kept_bytes(
    model: nn.Module,
    owned: ShardedOptimizerState,
    gradients: ShardedGradients,
    more: Iterable[Tensor] = (),
    *,
    units: Iterable[ShardedUnit] = (),
) -> dict[str, int]:
    """{"parameters", "gradients", "states"}: see ZeroOptimizer.memory.

    Args:
        more: States besides those of the pieces.
        units: Of stage 3, which have parameters that are not trained, too.
    """
    flats = dict.fromkeys([*owned.flats, *(flat for unit in units for flat in unit.flats)])
    shards = [getattr(flat, name, None) for flat in flats for name in ("shard", "kept")]
    parameters = _storages([*model.parameters(), *(flat.data for flat in flats), *shards])
    states: list[Any] = [
        value for entries in owned.optimizer.state.values() for value in entries.values()
    ]
    pieces = owned.all_pieces()
    masters = [each.parameter for each in pieces if each.target is not None] + [
        each.result for each in pieces
    ]
    kept = _storages([*states, *masters, *more])
    of_gradients = sum(bucket.kept_bytes for bucket in gradients.buckets)
    if owned.offloaded is not None:
        kept = {0: owned.offloaded.resident_bytes, **_storages(each.result for each in pieces)}
    return {
        "parameters": sum(parameters.values()),
        "gradients": of_gradients,
        "states": sum(size for address, size in kept.items() if address not in parameters),
    }
