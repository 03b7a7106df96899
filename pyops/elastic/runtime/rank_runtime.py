"""RankRuntime: what this rank holds and computes in the present layout, and how it goes over to the
next one.

enter(packing, states)   memory and values for its layers -> groups -> frozen layers -> worker
states()                 what has to last, by layer
detach()                 closes worker and groups; the layers keep their values until the next enter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import agree
from pyops.comm.broadcast import broadcast
from pyops.elastic.frozen.frozen_layers import FrozenLayers
from pyops.elastic.frozen.host_cache import CacheOptions, HostCache
from pyops.elastic.layout.layer_memory import (
    Initialize,
    drop_memory,
    freeze,
    is_held,
    lacks_tables,
    take,
    values_of,
)
from pyops.elastic.layout.layer_moves import LayerState
from pyops.elastic.layout.process_groups import LayoutGroups, RunGroups, abort_on_failure
from pyops.elastic.layout.rank_layout import Layout
from pyops.elastic.layout.sampler import Sampler
from pyops.elastic.planning.confirmation import confirm
from pyops.elastic.planning.packing import Packing
from pyops.elastic.planning.trial import RowsOf, Trial
from pyops.elastic.policy.gradient_meter import Meter
from pyops.elastic.runtime.replica_worker import MakeOptimizer, ReplicaWorker, make_pipeline
from pyops.mesh import ALONE
from pyops.pipeline import Pipeline

__all__ = ["RankRuntime", "RuntimeOptions"]


@dataclass(frozen=True)
class RuntimeOptions:
    """What is the same in all layouts; see `Elastic`.

    Attributes:
        key: (names, layers, micro-batch) before each forward.
    """

    loss: Callable[[Any, Any], Tensor]
    make_optimizer: MakeOptimizer
    schedule: str
    device: torch.device
    chunk: int
    key: Callable[[Sequence[str], Sequence[nn.Module], int], None]
    initialize: Initialize | None = None
    trial: RowsOf | None = None


class RankRuntime:
    """layers: of the whole model, by name, in order. everyone: the groups of all ranks. sampler: is
    told which replica this rank is. worker is None on a rank that is idle; is_cached: what frozen
    layers say is read, as was decided."""

    layout: Layout
    worker: ReplicaWorker | None = None
    meter: Meter
    is_cached = False
    _groups: LayoutGroups

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        options: RuntimeOptions,
        *,
        sampler: Sampler,
        cache: CacheOptions,
        held_out: int,
        everyone: RunGroups,
    ) -> None:
        self.layers, self._options, self._sampler, self._everyone = (
            dict(layers),
            options,
            sampler,
            everyone,
        )
        self.rank = 0 if everyone.control_group is None else dist.get_rank(everyone.control_group)
        self.host_cache = HostCache(
            cache, samples=sampler.samples, held_out=held_out, control_group=everyone.control_group
        )

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None: one process alone."""
        return self._everyone.control_group

    @property
    def failure(self) -> Exception | None:
        """What this rank's optimizer raised in a step that others took."""
        return None if self.worker is None else self.worker.failure

    def barrier(self, what: str, error: Exception | None = None) -> None:
        """Wait for all ranks, idle ones too, to call `what`, and raise on all what went wrong on
        one."""
        self._everyone.barrier(what, error, is_idle=not self.is_active)

    @property
    def is_active(self) -> bool:
        """Whether this rank has work in the present layout."""
        return self.layout.is_active(self.rank)

    @property
    def replica(self) -> int:
        """Of this rank; 0 of an idle one."""
        return self.layout.replica(self.rank) if self.is_active else 0

    @property
    def writes(self) -> bool:
        """Whether this rank is the first of those that hold its layers, and saves them."""
        return self.is_active and self.layout.is_first(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that share its layers' weights."""
        return self.rank % self.layout.tensor == 0

    @property
    def held(self) -> list[bool]:
        """Of each block, whether this rank has it."""
        return [is_held(layer) for layer in list(self.layers.values())[1:-1]]

    def enter(
        self,
        packing: Packing,
        layout: Layout,
        states: Mapping[int, LayerState],
        *,
        first: bool = False,
    ) -> str:
        """Begin with `layout`, of a packing; the reason for it.

        Args:
            states: Of layers that come, or go on; none at the start, the first time.
        """
        self.layout = layout
        error: Exception | None = None
        try:
            self._hold(states)
        except Exception as caught:
            error = caught
        agree(error, group=self.control_group)
        self._groups = LayoutGroups(layout, control_group=self.control_group)
        if first:
            self._align()
        prefix = self._prefix()
        has_prefix = prefix is not None and self.is_active and layout.stage(self.rank) == 0
        self.is_cached = bool(layout.frozen) and self.host_cache.attach(
            prefix if has_prefix else None, replica=self.replica
        )
        self._sampler.resize(rank=self.replica, replicas=layout.replicas)
        if self._options.trial is not None and layout.stages > 1:
            packing = self._tried(packing, prefix, self._options.trial)
            self.layout = layout = replace(layout, micro_batches=packing.micro_batches)
        options, worker = self._options, None
        try:
            if self.is_active:
                worker = ReplicaWorker(
                    layout,
                    self.rank,
                    layers=self.layers,
                    prefix=prefix,
                    groups=self._groups,
                    states=states,
                    make_optimizer=options.make_optimizer,
                    before=options.key,
                )
        except Exception as caught:
            error = caught
        agree(error, group=self.control_group)
        if worker is not None:
            with abort_on_failure(self._everyone.waiting_group):
                worker.connect(loss=options.loss, schedule_name=options.schedule)
            self.worker = worker
            blocks, counted = list(self.layers.values())[1:-1], {id(p) for p in worker.counted}
            self.meter = Meter(
                [
                    [p for p in layer.parameters() if layout.tensor == 1 or id(p) in counted]
                    if is_held(layer)
                    else []
                    for layer in blocks
                ]
            )
        return packing.reason

    def _tried(self, packing: Packing, prefix: FrozenLayers | None, rows_of: RowsOf) -> Packing:
        """With the number of micro-batches that a trial finds fastest."""
        if not self.is_active:
            return confirm(packing, lambda count: 0.0, group=self.control_group)
        layout = self.layout
        for number in layout.layers(self.rank):
            self.layers[list(self.layers)[number]].requires_grad_(
                number >= layout.frozen
            ).eval()  # dropout has no key here

        def make(count: int) -> Pipeline:
            return make_pipeline(
                replace(layout, micro_batches=count),
                layers=list(self.layers.values()),
                prefix=prefix,
                groups=self._groups,
                loss=self._options.loss,
                schedule_name=self._options.schedule,
            )

        rows = -(-self._sampler.global_batch // layout.replicas)
        trial = Trial(
            make,
            rows_of,
            rows=rows,
            first=self.replica * rows,
            samples=self._sampler.samples,
            numbered=bool(layout.frozen),
        )
        try:
            return confirm(packing, trial, group=self.control_group)
        finally:
            trial.close()

    def _hold(self, states: Mapping[int, LayerState]) -> None:
        """Memory and values for the layers of this rank, and for no others."""
        own = self.layout.layers(self.rank) if self.is_active else range(0)
        for number, (name, layer) in enumerate(self.layers.items()):
            if number not in own:
                drop_memory(layer)
            elif not is_held(layer) or lacks_tables(layer):
                coming = states.get(number)
                cut = len(name) + 1
                values = (
                    None
                    if coming is None
                    else {key[cut:]: value for key, value in coming["parameters"].items()}
                )
                initialize = (
                    None
                    if self._options.initialize is None
                    else partial(self._options.initialize, name)
                )
                take(layer, values, device=self._options.device, initialize=initialize)
            if number in own and number < self.layout.frozen:
                freeze(layer)

    def _align(self) -> None:
        """Every replica begins with the values of the first, as with DistributedDataParallel."""
        if (dp_group := self._groups.dp_group) is None:
            return
        layers = list(self.layers.values())
        values = (
            tensor
            for number in self.layout.layers(self.rank)
            for tensor in values_of(layers[number]).values()
        )
        with abort_on_failure(self._everyone.waiting_group):
            broadcast(values, group=dp_group)

    def _prefix(self) -> FrozenLayers | None:
        """The frozen layers as one; on ranks that have them not, to say which arguments they
        take."""
        if not self.layout.frozen:
            return None
        frozen = list(self.layers.values())[: self.layout.frozen]
        return FrozenLayers(
            frozen,
            chunk=self._options.chunk,
            stored=self.host_cache.options.stored,
            group=self._groups.cp_group or ALONE,
        )

    def states(self) -> dict[int, LayerState]:
        """{layer: {"parameters": {name: tensor}, "slots": {name: the optimizer's}}} of this rank's
        layers: those in use. A frozen layer has no slots."""
        if self.worker is None:
            return {}
        found: dict[int, LayerState] = {}
        own = self.layout.layers(self.rank)
        for number, (name, layer) in enumerate(self.layers.items()):
            if (
                number < self.layout.frozen and number in own
            ):  # one without tensors is held by every rank
                values = {f"{name}.{key}": tensor for key, tensor in values_of(layer).items()}
                found[number] = {"parameters": values, "slots": {}}
        return found | self.worker.states()

    def gradient_norms(self) -> list[float] | None:
        """Of each block since the last call, the same on all ranks of this rank's pipeline; None on
        an idle rank.

        Raises:
            ValueError: On all of these, where no step was measured.
        """
        if self.worker is None:
            return None
        return self.meter.take(
            group=self._groups.pp_group, shared=self._groups.pp_group is not None
        )

    def clear_cache(self) -> None:
        """What frozen layers said: other weights come."""
        self.host_cache.clear()

    def detach(self) -> None:
        """Let go of the layout."""
        if self.worker is not None:
            self.worker.close()
            self.meter = Meter(
                [[] for _ in self.held]
            )  # the other one holds the parameters, and with them their memory
        self.worker = None
        self._groups.close()

    def close(self) -> None:
        """Let go of everything but the layers."""
        self.detach()
        self.host_cache.close()
