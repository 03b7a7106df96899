"""ReplicaWorker: what one rank does in one layout: a stage of a pipeline, the sum of its gradients
over
the replicas, its optimizer.

    replica 0   FrozenLayers(embedding .. block 5) block 6 | block 7 .. block 11 head
    replica 1   FrozenLayers(embedding .. block 5) block 6 | block 7 .. block 11 head

pp_group: the ranks of a row; dp_group: the ranks of a column. Where neighbors share weights, each
of them is such a rank, and sums the gradients of its own parts; tp_group: these neighbors.

It is made when a layout begins and closed when it ends; what has to last is `states()`: tensors by
layer and name.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.buckets.grad_norm import sum_of_squares
from pyops.comm.collectives.functional import all_reduce
from pyops.comm.failure import CommunicationError
from pyops.elastic.frozen.frozen_layers import FrozenLayers
from pyops.elastic.layout.layer_memory import values_of
from pyops.elastic.layout.layer_moves import LayerState
from pyops.elastic.layout.process_groups import LayoutGroups, agree_in_group
from pyops.elastic.layout.rank_layout import Layout
from pyops.elastic.layout.shared_weights import counts, placements_of
from pyops.flat import FlatBuffer, check_free, claim, release
from pyops.mesh import ALONE
from pyops.pipeline import Pipeline, PipelineConfig, schedule
from pyops.pipeline.runtime.stage import Stage

__all__ = ["MakeOptimizer", "ReplicaWorker", "make_pipeline"]

logger = logging.getLogger("pyops")

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class ReplicaWorker:
    """This rank's part in `layout`.

    Args:
        layers: All of the model, by name, in order; those of this rank have memory and values.
        prefix: The frozen ones as one module, None where none is frozen.
        states: What `states` of an earlier worker gave, or empty.
        before: (names of a stage's layers, layers, micro-batch) before each forward of active
            layers. loss, of `connect`: (what the last layer returns, target) -> the sum over rows.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        *,
        layers: Mapping[str, nn.Module],
        prefix: FrozenLayers | None,
        groups: LayoutGroups,
        states: Mapping[int, LayerState],
        make_optimizer: MakeOptimizer,
        before: Callable[[Sequence[str], Sequence[nn.Module], int], None],
    ) -> None:
        self.layout, self.groups, self._names = layout, groups, list(layers)
        self._layers, self._before, self.flagged = list(layers.values()), before, False
        self.failure: Exception | None = None  # of this rank's optimizer in a step that others took
        self._is_first = bool(layout.frozen) and layout.stage(rank) == 0
        frozen = layout.frozen
        self._shift, self._prefix = max(0, frozen - 1), prefix
        places = placements_of(layers) if layout.tensor > 1 else {}
        shares_first = rank % layout.tensor == 0
        self.own = [n for n in layout.layers(rank) if n >= frozen]
        for number in self.own:
            self._layers[number].requires_grad_(True).train()
        self.buffers = self._flat()
        named = [(name, parameter) for buffer in self.buffers for name, parameter in _named(buffer)]
        # Of parameters that neighbors have too, those that this rank counts.
        self.counted = [p for name, p in named if counts(places.get(name), is_first=shares_first)]
        self.optimizer = make_optimizer(named) if named else None
        self._rates = [] if self.optimizer is None else _rates(self.optimizer)
        if self.optimizer is not None:
            self._load_slots(states)

    def connect(self, *, loss: Callable[[Any, Any], Tensor], schedule_name: str) -> None:
        """Make the pipeline. A collective of its ranks, once it is known that all have their
        buffers and optimizers."""
        self.pipeline = make_pipeline(
            self.layout,
            layers=self._layers,
            prefix=self._prefix,
            groups=self.groups,
            loss=loss,
            schedule_name=schedule_name,
            before=self._key,
        )

    def _flat(self) -> list[FlatBuffer]:
        """Parameters and gradients of this rank's active layers, one buffer for each dtype."""
        by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for number in self.own:
            for name, parameter in self._layers[number].named_parameters():
                parameter.grad = None
                by_dtype.setdefault(parameter.dtype, []).append(
                    (f"{self._names[number]}.{name}", parameter)
                )
        check_free((each for some in by_dtype.values() for each in some), who="Elastic")
        buffers = [FlatBuffer(some) for some in by_dtype.values()]
        claim(
            (parameter for buffer in buffers for parameter in buffer.parameters),
            self,
            who="Elastic",
        )
        return buffers

    @property
    def computes_frozen(self) -> bool:
        """Whether the frozen layers are on this rank, and nothing of what they say is read."""
        return self._is_first and self._prefix is not None and self._prefix.cache is None

    def _key(self, stage: Stage, number: int) -> None:
        if self.failure is not None:
            raise self.failure
        first = 1 if stage.first == 0 and self.layout.frozen else 0  # the prefix drops nothing
        begin = stage.first + first + self._shift
        self._before(
            self._names[begin : begin + len(stage.layers) - first], stage.layers[first:], number
        )

    def augment(self, seed: int) -> None:
        """Which of a sample's inputs come next: what is kept of others is not read."""
        if self._prefix is not None:
            self._prefix.seed = seed

    def prefetch(self, samples: Tensor) -> None:
        """Begin to read what frozen layers say to these, which come next, where a disk has it."""
        if self._prefix is not None:
            self._prefix.prefetch(samples)

    # --------------------------------------------------------------------------------------------
    # a step

    def differentiate(
        self, inputs: Any, target: Any, *, scale: float, flag: bool = False, **named: Any
    ) -> float:
        """The loss, summed over the batch of all replicas, on each rank; gradients are summed over
        them, times `scale`.

        Args:
            flag: Of this rank; `flagged` says after `step` whether it was set on any. What the
                pipeline of one replica raises is raised in all.
        """
        for buffer in self.buffers:
            buffer.zero_grad()
        loss = 0.0
        error: Exception | None = None
        try:
            loss = float(self.pipeline.step(inputs, target, scale=scale, **named))
        except CommunicationError:
            raise
        except Exception as caught:
            error = caught
        told = torch.tensor(
            [loss, float(flag), float(error is not None)], dtype=torch.float64, device="cpu"
        )
        if self.groups.dp_group is not None:
            all_reduce(told, group=self.groups.dp_group, label="the loss over the replicas")
        if self.groups.tp_group is not None:  # each of which has the same loss
            all_reduce(told, group=self.groups.tp_group, label="the loss of shared layers")
            told[0] /= self.layout.tensor
        total_loss, flags, errors = map(float, told.tolist())
        if errors:
            self._raise_everywhere(error)
        if self.groups.dp_group is not None:
            for buffer in self.buffers:
                all_reduce(
                    buffer.grad,
                    group=self.groups.dp_group,
                    label="gradients of a stage over the replicas",
                )
        self.flagged = bool(flags)
        return total_loss

    def _raise_everywhere(self, error: Exception | None) -> None:
        """On all ranks of all replicas what one of them raised."""
        try:
            agree_in_group(error, group=self.groups.dp_group)
        except CommunicationError:
            raise
        except Exception as caught:
            error = caught
        agree_in_group(error, group=self.groups.tp_group)

    def norm(self) -> float:
        """Of these gradients over all stages; nan where it is not finite. The same on all ranks."""
        told = torch.tensor([0.0, float(self.flagged)], dtype=torch.float64, device="cpu")
        told[0] = self._squares()
        if self.groups.tp_group is not None:
            all_reduce(told, group=self.groups.tp_group, label="the squared norm of shared layers")
        if self.groups.pp_group is not None:
            all_reduce(told, group=self.groups.pp_group, label="the squared norm over the stages")
        squares, flags = told.tolist()
        self.flagged = bool(flags)
        return math.sqrt(squares) if math.isfinite(squares) else math.nan

    def _squares(self) -> float:
        """Of the elements of gradients that this rank counts."""
        if self.layout.tensor == 1:
            return sum(
                float(sum_of_squares([buffer.grad], device="cpu")[0]) for buffer in self.buffers
            )
        gradients = [p.grad for p in self.counted if p.grad is not None]
        return float(sum_of_squares(gradients, device="cpu")[0]) if gradients else 0.0

    def update(self, norm: float, *, lr: float, max_grad_norm: float | None) -> None:
        """One optimizer step with these gradients, of that norm; nothing where it is not finite.

        Args:
            lr: In place of the optimizer's default; parameter groups with another one keep its
                ratio to that. What the optimizer raises while other ranks take the step is kept as
                `failure`: they would wait for a rank that leaves now.
        """
        if self.optimizer is None or not math.isfinite(norm):
            return
        if max_grad_norm is not None and norm > max_grad_norm:
            for buffer in self.buffers:
                buffer.grad.mul_(max_grad_norm / (norm + 1e-6))
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = lr * rate
        try:
            self.optimizer.step()
        except CommunicationError:
            raise
        except Exception as error:
            if self.layout.ranks == 1:
                raise
            logger.exception(
                "this rank's optimizer failed in a step that other ranks take; all hear "
                "of it at their next call"
            )
            self.failure = error.with_traceback(None)  # which would keep the optimizer

    # --------------------------------------------------------------------------------------------
    # states

    def states(self) -> dict[int, LayerState]:
        """{layer: {"parameters", "slots"}} of this rank's active layers, by names in the model: the
        tensors in use."""
        slots = self._slots()
        found: dict[int, LayerState] = {}
        for number in self.own:
            prefix = self._names[number]
            parameters = {
                f"{prefix}.{name}": tensor
                for name, tensor in values_of(self._layers[number]).items()
            }
            found[number] = {
                "parameters": parameters,
                "slots": {name: slots[name] for name in parameters if name in slots},
            }
        return found

    def _slots(self) -> dict[str, dict[str, Any]]:
        if self.optimizer is None:
            return {}
        saved = self.optimizer.state_dict()
        names = self._names_by_index()
        return {names[index]: dict(slots) for index, slots in saved["state"].items()}

    def _load_slots(self, states: Mapping[int, LayerState]) -> None:
        slots = {
            name: each
            for number in self.own
            if number in states
            for name, each in states[number]["slots"].items()
        }
        if not slots:
            return
        assert self.optimizer is not None
        names = self._names_by_index()
        state = {index: slots[name] for index, name in names.items() if name in slots}
        self.optimizer.load_state_dict(
            {"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]}
        )

    def _names_by_index(self) -> dict[int, str]:
        """By the numbers that torch.optim gives parameters in a state_dict."""
        assert self.optimizer is not None
        known = {
            id(parameter): name for buffer in self.buffers for name, parameter in _named(buffer)
        }
        everyone = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        return {index: known[id(parameter)] for index, parameter in enumerate(everyone)}

    def close(self) -> None:
        """Let go of the pipeline and of gradients. The layers keep their values."""
        for number in self.own:
            for parameter in self._layers[number].parameters():
                parameter.grad = None
        release((parameter for buffer in self.buffers for parameter in buffer.parameters), self)
        self.pipeline.close()
        self.buffers, self.optimizer, self._prefix, self.failure = [], None, None, None


def make_pipeline(
    layout: Layout,
    *,
    layers: Sequence[nn.Module],
    prefix: FrozenLayers | None,
    groups: LayoutGroups,
    loss: Callable[[Any, Any], Tensor],
    schedule_name: str,
    before: Callable[[Stage, int], None] | None = None,
) -> Pipeline:
    """The pipeline of this rank's replica, in which the frozen layers are one."""
    whole = list(layers) if prefix is None else [prefix, *layers[layout.frozen :]]
    shift = max(0, layout.frozen - 1)
    return Pipeline(
        whole,
        schedule=schedule(
            schedule_name, num_stages=layout.stages, num_microbatches=layout.micro_batches
        ),
        group=ALONE if groups.pp_group is None else groups.pp_group,
        loss=loss,
        config=PipelineConfig(
            reduction="sum",
            tied=None,
            before_forward=before,
            boundaries=[0, *(bound - shift for bound in layout.boundaries[1:])],
        ),
    )


def _named(buffer: FlatBuffer) -> list[tuple[str, nn.Parameter]]:
    # From the first layer to the last, as in the model; a buffer has them the other way round.
    return list(zip(buffer.names, buffer.parameters, strict=True))[::-1]


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each group as a multiple of the optimizer's default, which is the same
    on ranks that have not all groups. ValueError where that is 0 and a group has another."""
    default: Any = optimizer.defaults.get("lr")
    own: list[Any] = [group.get("lr") for group in optimizer.param_groups]
    if not default:
        if any(own):
            raise ValueError(
                f"the optimizer's default lr is {default}, but its groups have {own}; give it one"
            )
        return [1.0] * len(own)
    return [float(group["lr"]) / float(default) for group in optimizer.param_groups]
