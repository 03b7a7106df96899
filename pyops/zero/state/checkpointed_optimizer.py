"""CheckpointedOptimizer: what a ZeroOptimizer gives to a checkpoint, and takes from one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.buckets.reduce_axes import OwnRanks
from pyops.comm.collectives.communicator import Communicator
from pyops.flat import Placement
from pyops.mesh import ProcessGroupLike
from pyops.protocols import ParamGroup
from pyops.zero.agreement import agreed
from pyops.zero.config import ZeroConfig
from pyops.zero.hooks.overlapped_gather import OverlappedAllGather
from pyops.zero.hooks.sharded_gradients import ShardedGradients
from pyops.zero.hooks.unshard_hooks import UnshardHooks
from pyops.zero.layout.parameter_file import in_memory
from pyops.zero.state.memory import kept_bytes
from pyops.zero.state.saving import (
    check_names,
    collect,
    collect_model,
    distribute,
    distribute_model,
    regions_of,
)
from pyops.zero.update.delayed_update import DelayedUpdate
from pyops.zero.update.one_bit import OneBit, check_phase
from pyops.zero.update.pipeline_axis import PipelineAxis
from pyops.zero.update.precision_plan import PrecisionPlan
from pyops.zero.update.sharded_optimizer_state import ShardedOptimizerState, StateLoaders
from pyops.zero.update.tensor_parallel_axis import TensorParallelAxis

__all__ = ["CheckpointedOptimizer"]


class CheckpointedOptimizer(torch.optim.Optimizer):
    """The part of a ZeroOptimizer that states go through, by parameter name."""

    model: nn.Module
    stage: int
    group: ProcessGroupLike
    communicator: Communicator | None
    config: ZeroConfig
    owned: ShardedOptimizerState
    gradients: ShardedGradients
    gathering: UnshardHooks
    arriving: OverlappedAllGather
    delayed: DelayedUpdate | None
    numbers: PrecisionPlan
    one_bit: OneBit | None
    tensor_parallel: TensorParallelAxis | None
    stages: PipelineAxis | None
    _names: dict[int, str]
    _placements: Mapping[str, Placement]
    _own_ranks: Mapping[int, OwnRanks]

    def state_dict(self) -> ParamGroup:  # type: ignore[override]
        """{"state": {parameter's name: {key: pyops.flat.Shard}}, "param_groups": [options and
        names]}.

        Each rank's own part, sharing memory with the states in use, and read from a folder when it
        is used; `pyops.checkpoint.save` writes all ranks' as one.
        """
        if self.delayed is not None:
            self.delayed.wait()
        found = collect(self.owned, self.param_groups, self._names, everyone=self.communicator)
        found |= {} if self.one_bit is None else self.one_bit.state_dict()
        return (
            found
            | self.numbers.state_dict()
            | ({} if self.delayed is None else {"steps": self.delayed.steps})
        )

    def memory(self) -> dict[str, int]:
        """{"parameters", "gradients", "states"}: bytes that this rank keeps now, every storage
        once; of gradients those between backward and step. Buckets and blocks on their way come on
        top."""
        return kept_bytes(
            self.model,
            self.owned,
            self.gradients,
            [] if self.one_bit is None else self.one_bit.kept(),
            units=self.gathering.units,
        )

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Within the block the parameters are whole on every rank: to look at, to save, to load. A
        collective, at stage 3.

        What is written into them stays: each rank keeps its own part of its own values. Masters of
        16-bit parameters are set to them by `refresh_masters`.
        """
        self.arriving.wait()
        self.gathering.pin(True)
        try:
            yield
        finally:
            self.gathering.pin(False)

    def refresh_masters(self) -> None:
        """Set every float32 master to its parameter: call it after loading weights into the
        model."""
        if self.delayed is not None:
            self.delayed.wait()
        self.owned.refresh_masters()
        if self.one_bit is not None:
            self.one_bit.refresh_masters()

    def stepped_tensors(self) -> list[tuple[str, Tensor, Tensor | None]]:
        """What this rank steps, as `pyops.local_sgd` exchanges it among replicas: (name of the
        parameter, the flat piece of it or its fp32 master, the piece that is rounded from the
        master or None). Call `publish_stepped` after writing into them.

        Raises:
            ValueError: With offload, delayed updates, or gradients that are compressed to 1 bit,
                whose states are not the whole of what the next step begins with.
        """
        for option, given in (
            ("offload", self.owned.offloaded is not None),
            ("delayed_update", self.delayed is not None),
            ("a one-bit optimizer", self.one_bit is not None),
        ):
            if given:
                raise ValueError(
                    f"this ZeroOptimizer has {option}, with which nothing else can set what it "
                    "steps; make it without"
                )
        self.arriving.wait()
        found: list[tuple[str, Tensor, Tensor | None]] = []
        for each in self.owned.all_pieces():
            master = self.owned.states_of(each).get("master")
            if not each.piece.numel:
                continue
            if master is None:
                found.append((each.name, each.tensor, None))
            else:
                found.append((each.name, master, each.tensor))
        return found

    @torch.no_grad()
    def publish_stepped(self) -> None:
        """Bring to all ranks what was written into the tensors of `stepped_tensors`. A
        collective."""
        self.arriving.wait()
        self.gathering.release_all()
        if self.communicator is not None:
            self.arriving.start(self.communicator, async_op=False)

    def model_state_dict(self) -> ParamGroup:
        """The model's state by name; parameters that are spread over the ranks as pyops.flat.Shard,
        this rank's part."""
        self.arriving.wait()
        found = collect_model(
            self.model, self.gathering.units, self.communicator, self._placements, self._own_ranks
        )
        others = (
            self.communicator,
            None if self.tensor_parallel is None else self.tensor_parallel.communicator,
        )
        return found if self.stages is None else self.stages.share(found, copies=others)

    def load_model_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `model_state_dict` gave, or a checkpoint of it, of any stage and number of
        ranks, or the model's own state_dict(). Whole tensors, or ranges that hold this rank's part.

        Raises:
            ValueError: On every rank and before anything is changed, for the state of another
                model. Masters are refreshed: load the optimizer's state afterwards.
        """

        def filling() -> list[Callable[[], None]]:
            mine = state if self.stages is None else self.stages.take(state)
            return distribute_model(self.model, self.gathering.units, mine, self._placements)

        fill = agreed(filling, group=self.group)
        self.gathering.release_all()
        self.arriving.wait()
        with torch.no_grad(), in_memory(regions_of(self.gathering.units)):
            for each in fill:
                each()
        self.refresh_masters()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take up what `state_dict` gave, or a checkpoint of it: of any stage, number of ranks and
        bucket size.

        Tensors may be whole, or ranges that hold this rank's.

        Raises:
            ValueError: On every rank and before anything is changed, for the state of another
                model. The options of param groups are taken over, as torch.optim does.
        """

        def parts() -> list[StateLoaders]:
            check_names(self.param_groups, state_dict, self._names)
            check_phase(self.one_bit, state_dict)
            return distribute(self.owned, state_dict)

        coming = agreed(parts, group=self.group)
        self.numbers.load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        if self.delayed is not None:
            self.delayed.wait()
            self.delayed.steps = int(state_dict.get("steps", 0))
        self.owned.load(coming, self.param_groups)
        if self.one_bit is not None:
            self.one_bit.load_state_dict(state_dict)
        if self.delayed is None and self.communicator is not None:
            self.arriving.start(
                self.communicator, async_op=self.config.overlap_grad_reduce
            )  # a state may be ahead of the model it came with
        self.state = self.owned.optimizer.state
