"""How the ranks of a run share a model out: [parallel] of a configuration.

    16 ranks, tp = 2, pp = 4   4 stages of layers; each layer cut in two; 2 such models, which see
                               other sequences (dp)

Pipeline ranks take turns with `num_microbatches` parts of their sequences, in the order of a
schedule of `pyops.pipeline`. `pyops.config.run_plan` makes the ParallelPlan of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from pyops.context_parallel import METHODS
from pyops.parallel.plan import RECOMPUTE, SCHEDULES, WITH_STAGES_PER_RANK
from pyops.tensor_parallel.grids import MODES, grid_shape

__all__ = ["SCHEDULES", "ParallelConfig"]

ORDERS = ("zigzag", "contiguous", "striped")
ENOUGH = 4  # micro-batches for each rank, where nothing is said


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks share a model; the others hold the same and see other sequences. None of this
    changes the loss.

    Of a pipeline: schedule: of `SCHEDULES`. v: stages on each rank, with interleaved and
    interleaved_zb. num_microbatches: into how many a model's sequences are cut; 0: as
    train.micro_batch says, or else 4 for each rank of the pipeline, or fewer where that does not
    divide them. recompute: which of them keep the inputs of stages alone, and compute the stages
    again: never, except_last, always.

    Attributes:
        tp: Neighbouring ranks that cut each layer among them (tensor parallelism).
        sequence_parallel: Between the layers each of them keeps its share of the tokens only.
        grid: How these ranks lie: "1d"; or "2d" (q x q), "2.5d" (d x q x q) or "3d" (l x l x l),
            in which they share out every tensor, those between the layers, too.
        pp: Ranks that hold different layers (pipeline parallelism).
        dp: Models; 0: as many as there are ranks for.
        cp: Ranks that share out the tokens of each sequence (context parallelism).
        cp_method: How attention goes over them: gather, ulysses or ring.
        cp_order: Which tokens each of them holds: zigzag, contiguous or striped.
    """

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    dp: int = 0
    cp: int = 1
    cp_method: str = "gather"
    cp_order: str = "zigzag"
    schedule: str = "1f1b"
    v: int = 1
    num_microbatches: int = 0
    recompute: str = "never"
    adapt: bool = False
    memory_bytes: int = 0
    grid: str = "1d"

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("dp", "num_microbatches", "memory_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name, known in (
            ("schedule", SCHEDULES),
            ("recompute", RECOMPUTE),
            ("cp_method", METHODS),
            ("cp_order", ORDERS),
            ("grid", ("1d", *MODES)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}"
                )
        if self.v > 1 and self.schedule not in WITH_STAGES_PER_RANK:
            raise ValueError(
                f"v is {self.v}, but schedule {self.schedule!r} has no such option; set "
                f"it to {' or '.join(WITH_STAGES_PER_RANK)}"
            )
        self._check_context()
        self._check_grid()
        if self.memory_bytes and not self.adapt:
            raise ValueError(
                f"memory_bytes is {self.memory_bytes}, which only adapt looks at; set "
                "adapt to true, or this to 0"
            )
        if self.pp == 1:
            for name, usual in (("num_microbatches", 0), ("recompute", "never")):
                if getattr(self, name) != usual:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}, but pp is 1: there is no "
                        "pipeline; set pp to 2 or more"
                    )

    def _check_grid(self) -> None:
        if self.grid == "1d":
            return
        grid_shape(self.tp, self.grid)
        for name, usual, why in (
            ("sequence_parallel", False, "shares out what is between the layers itself"),
            ("pp", 1, "has no stages of a pipeline"),
            ("cp", 1, "shares out whole sequences"),
            ("adapt", False, "is not chosen by adapt"),
        ):
            if getattr(self, name) != usual:
                given = json.dumps(getattr(self, name))
                raise ValueError(
                    f"{name} is {given}, but a grid ({self.grid}) {why}; set it to "
                    f"{json.dumps(usual)}, or grid to 1d"
                )

    def _check_context(self) -> None:
        if self.cp > 1 and self.adapt:
            raise ValueError(
                f"cp is {self.cp}, and adapt chooses a layout without it; set adapt to false, or "
                "cp to 1"
            )
        for name, default in (("cp_method", "gather"), ("cp_order", "zigzag")):
            if self.cp == 1 and getattr(self, name) != default:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, but cp is 1: no rank shares a sequence "
                    "with another; set cp to 2 or more"
                )

    @property
    def num_stages(self) -> int:
        """Of the pipeline, over all its ranks."""
        return self.pp * (2 if self.schedule == "zbv" else self.v)

    def copies(self, num_ranks: int) -> int:
        """How many models `num_ranks` ranks hold.

        Raises:
            ValueError: Where they hold no whole number of them, or not `dp`.
        """
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp}
        wide = {key: size for key, size in sizes.items() if size > 1 or key == "tp"}
        ranks, one = self.tp * self.pp * self.cp, len(wide) == 1
        name = " x parallel.".join(wide)
        each = str(ranks) if one else f"{' x '.join(map(str, wide.values()))} = {ranks}"
        if num_ranks % ranks:
            near = max(ranks, num_ranks // ranks * ranks)
            divisor = (
                f"set {'parallel.tp' if one else 'them'} to {'a divisor' if one else 'divisors'}"
            )
            raise ValueError(
                f"{name} is {each}, of which {num_ranks} ranks are no multiple; start a "
                f"multiple of {ranks}, such as {near}, "
                f"or {divisor} of {num_ranks}, or parallel.adapt to true"
            )
        found = num_ranks // ranks
        if self.dp and self.dp != found:
            raise ValueError(
                f"dp is {self.dp}, but {num_ranks} ranks hold {found} models of {ranks} "
                f"ranks each; start {self.dp * ranks} "
                f"ranks, or set dp to {found}, or to 0 for as many as fit"
            )
        return found

    def cut(self, sequences: int, *, micro_batch: int) -> int:
        """Into how many micro-batches `sequences` are cut.

        Args:
            micro_batch: Sequences in each, as they are asked for; 0: nobody does.

        Raises:
            ValueError: Where it can't be.
        """
        if self.num_microbatches:
            if micro_batch and micro_batch * self.num_microbatches != sequences:
                raise ValueError(
                    f"num_microbatches is {self.num_microbatches} and train.micro_batch "
                    f"{micro_batch}, but a model has {sequences} "
                    "sequences; set one of them to 0"
                )
            if sequences % self.num_microbatches:
                raise ValueError(
                    f"num_microbatches is {self.num_microbatches}, which does not divide the "
                    f"{sequences} sequences of a model; set "
                    f"it to a divisor of {sequences}, or to 0"
                )
            return self.num_microbatches
        if micro_batch:
            return sequences // micro_batch
        return (
            max(n for n in range(1, min(sequences, ENOUGH * self.pp) + 1) if sequences % n == 0)
            if self.pp > 1
            else 1
        )
