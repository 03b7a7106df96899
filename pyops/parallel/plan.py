"""ParallelPlan: how the ranks of a run share a model out; the same dataclasses for every model.

8 ranks    ParallelPlan(tp=2, pp=2, zero=ZeroConfig(stage=1))

pp   0: embeddings, first half of the blocks      tp   0  1     each layer cut in two
     1: second half, head                         dp   2        two such models, which see other
                                                                rows and share optimizer states
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pyops.context_parallel import METHODS
from pyops.mesh import Axes
from pyops.pipeline import Schedule, schedule
from pyops.precision import PRECISIONS
from pyops.zero import ZeroConfig

__all__ = ["RECOMPUTE", "SCHEDULES", "WITH_STAGES_PER_RANK", "ParallelPlan", "PipelineOptions"]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "interleaved_zb", "zbv")
WITH_STAGES_PER_RANK = ("interleaved", "interleaved_zb")
RECOMPUTE = ("never", "except_last", "always")
OFFLOADS = ("none", "cpu")
ROW_ORDERS = ("zigzag", "contiguous", "striped")  # which go by the length of a row alone
MICROBATCHES_PER_RANK = 2  # where nothing is said: half of the time of the bubble of one


@dataclass(frozen=True)
class PipelineOptions:
    """How the ranks of a pipeline take turns, and where the model is cut.

    `ParallelPlan.validate` checks the values.
    """

    schedule: str = "1f1b"
    """The order of the actions: "gpipe", "1f1b", "interleaved", "zb1p", "interleaved_zb" or "zbv";
    see docs/pipeline.md."""

    num_microbatches: int = 0
    """Into how many micro-batches the rows of a step are cut. 0: two for each rank of the
    pipeline."""

    stages_per_rank: int = 1
    """How many stages a rank has, with "interleaved" and "interleaved_zb" (v in Narayanan et al.,
    SC 2021)."""

    recompute: str = "never"
    """Which micro-batches keep the inputs of a stage alone and compute the stage again in
    backward: "never", "except_last" or "always"."""

    blocks: tuple[str, ...] | None = None
    """The names of the model's lists of blocks, such as ("model.layers",). None: as the
    tensor-parallel plan of the model's class says, or the largest list of modules of one class."""

    gather_once: bool = False
    """With zero.stage 3: whether a rank gathers the parameters of its stages once a step, and keeps
    them whole meanwhile, instead of block by block for each micro-batch. Sends less, takes the
    memory of a whole stage."""

    boundaries: tuple[int, ...] | None = None
    """The first block of each stage and, last, the number of blocks, over all lists; of a
    `LayeredModel` of its layers. None: the stages have about equally many parameters, those of the
    embeddings apart, or of a `LayeredModel` about equal costs."""

    @property
    def num_stages_per_rank(self) -> int:
        """Of the schedule: "zbv" has two."""
        return 2 if self.schedule == "zbv" else self.stages_per_rank


@dataclass(frozen=True)
class ParallelPlan:
    """How a model is shared out, and what it computes in.

    Making a plan checks nothing, so that no rank fails alone; `parallelize` calls `validate` on all
    ranks together.
    """

    tp: int = 1
    """How many neighboring ranks cut each layer among them (tensor parallelism)."""

    pp: int = 1
    """How many ranks hold different blocks (pipeline parallelism)."""

    dp: int = 0
    """How many copies of the model there are, which see other rows (data parallelism). 0: as many
    as there are ranks for."""

    cp: int = 1
    """How many ranks share out the tokens of each row (context parallelism); a `LayeredModel` must
    have been made for as many, such as `pyops.models.GPT(context=...)`."""

    cp_method: str = "gather"
    """What travels between these ranks in attention: "gather", "ulysses" or "ring"; a
    `LayeredModel` has its own."""

    cp_order: str = "zigzag"
    """Which tokens of a row each has: "zigzag", "contiguous" or "striped"; a `LayeredModel` has its
    own."""

    sequence_parallel: bool = False
    """Whether each of the `tp` ranks keeps only its part of the tokens between the layers
    (Korthikanti et al., arXiv:2205.05198)."""

    tensor_parallel: Mapping[str, str] | None = None
    """{pattern of module names: kind} as `pyops.tensor_parallel.parallelize` takes it. None: the
    plan for the classes of the model's blocks."""

    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    """Of a plan with pp > 1."""

    zero: ZeroConfig = field(default_factory=ZeroConfig)
    """What the `dp` ranks share out. With pp > 1 the gradients of a pipeline stage are whole until
    its last micro-batch."""

    recompute: tuple[str, ...] = ()
    """Names of modules that keep their inputs alone and compute again in backward, with wildcards:
    ("model.layers.*",)."""

    recompute_offload: str = "none"
    """Where the inputs of recomputed modules are kept: "none" (on the device) or "cpu"."""

    precision: str = "fp32"
    """What the model computes in: "fp32", "bf16", or "fp16" with a loss scale. In 16 bits the
    optimizer keeps float32 master weights."""

    num_microbatches: int = 1
    """Without a pipeline: in how many parts the rows of a step are computed, one after the
    other."""

    fused_loss: bool = True
    """Whether the last layer of a language model computes the cross entropy by itself, without the
    logits of all tokens at a time (`pyops.tensor_parallel.linear_cross_entropy`), where the model
    returns its logits as they are. With sequence_parallel, or a loss of your own, it does not."""

    compile: bool = False
    """Whether each block is compiled by torch.compile, before the pipeline is cut; of a
    `LayeredModel` its layers that are items of a list."""

    max_grad_norm: float | None = None
    """Clip the gradient of the whole model to this 2-norm; None: no clipping."""

    def axes(self, num_ranks: int) -> Axes:
        """The mesh of `num_ranks` ranks.

        Raises:
            ValueError: They are no multiple of tp x pp x cp, or not the number that dp asks for.
        """
        each = self.tp * self.pp * self.cp
        if num_ranks % each or (self.dp and self.dp * each != num_ranks):
            wanted = f"tp {self.tp} x pp {self.pp}" + (f" x cp {self.cp}" if self.cp > 1 else "")
            wanted += f" x dp {self.dp}" if self.dp else ""
            raise ValueError(
                f"the plan is for {wanted} = {each * max(1, self.dp)} ranks"
                f"{'' if self.dp else ' or a multiple'}, but {num_ranks} run; start "
                f"{each * max(1, self.dp)} with torchrun --nproc-per-node, or change tp, pp or dp"
            )
        return Axes(pp=self.pp, dp=num_ranks // each, cp=self.cp, tp=self.tp)

    @property
    def num_stages(self) -> int:
        """Of the pipeline, over all its ranks."""
        return self.pp * self.pipeline.num_stages_per_rank

    @property
    def microbatches(self) -> int:
        """Into how many parts the rows of a step are cut."""
        if self.pp == 1:
            return self.num_microbatches
        return self.pipeline.num_microbatches or MICROBATCHES_PER_RANK * self.pp

    def schedule(self) -> Schedule:
        """What each rank of the pipeline computes, in its order."""
        options = self.pipeline
        several: dict[str, Any] = (
            {"v": options.stages_per_rank} if options.schedule in WITH_STAGES_PER_RANK else {}
        )
        found = schedule(
            options.schedule, num_stages=self.pp, num_microbatches=self.microbatches, **several
        )
        return found.with_recompute(options.recompute)

    def validate(self) -> None:
        """Check every field, and what goes together. Local: no rank is asked.

        Raises:
            ValueError, TypeError: Naming field, value and fix.
        """
        for name, least in (
            ("tp", 1),
            ("pp", 1),
            ("cp", 1),
            ("dp", 0),
            ("num_microbatches", 1),
        ):
            _check_count(f"ParallelPlan: {name}", getattr(self, name), least)
        if not isinstance(self.pipeline, PipelineOptions):
            raise TypeError(
                f"ParallelPlan: pipeline is {self.pipeline!r}; give "
                "PipelineOptions(schedule='1f1b')"
            )
        if not isinstance(self.zero, ZeroConfig):
            raise TypeError(f"ParallelPlan: zero is {self.zero!r}; give ZeroConfig(stage=1)")
        if isinstance(self.recompute, str):
            raise TypeError(
                f"ParallelPlan: recompute is {self.recompute!r}; give a tuple of names, "
                f"({self.recompute!r},)"
            )
        if self.recompute_offload not in OFFLOADS:
            raise ValueError(
                f"ParallelPlan: recompute_offload is {self.recompute_offload!r}; choose one of "
                f"{', '.join(OFFLOADS)}"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"ParallelPlan: precision is {self.precision!r}; choose one of "
                f"{', '.join(PRECISIONS)}"
            )
        self._check_context()
        self._check_pipeline()
        self._check_zero()

    def _check_context(self) -> None:
        for name, known in (("cp_method", METHODS), ("cp_order", ROW_ORDERS)):
            value, default = getattr(self, name), getattr(ONE_RANK, name)
            if value not in known:
                raise ValueError(
                    f"ParallelPlan: {name} is {value!r}; choose one of {', '.join(known)}"
                )
            if self.cp == 1 and value != default:
                raise ValueError(
                    f"ParallelPlan: {name} is {value!r}, but cp is 1: no ranks share out the "
                    f"tokens of rows; set cp to 2 or more, or leave {name} out"
                )

    def _check_pipeline(self) -> None:
        options = self.pipeline
        _check_count("PipelineOptions: num_microbatches", options.num_microbatches, 0)
        _check_count("PipelineOptions: stages_per_rank", options.stages_per_rank, 1)
        for name, known in (("schedule", SCHEDULES), ("recompute", RECOMPUTE)):
            if getattr(options, name) not in known:
                raise ValueError(
                    f"PipelineOptions: {name} is {getattr(options, name)!r}; choose one of "
                    f"{', '.join(known)}"
                )
        if options.stages_per_rank > 1 and options.schedule not in WITH_STAGES_PER_RANK:
            raise ValueError(
                f"PipelineOptions: stages_per_rank is {options.stages_per_rank}, but schedule "
                f"{options.schedule!r} has one stage on each rank; choose "
                f"{' or '.join(WITH_STAGES_PER_RANK)}"
            )
        if self.pp == 1 and options != PipelineOptions():
            given = [f.name for f in fields(options) if getattr(options, f.name) != f.default]
            raise ValueError(
                f"ParallelPlan: pp is 1, but pipeline has {given[0]}="
                f"{getattr(options, given[0])!r}; set pp to 2 or more, or leave pipeline out"
            )
        if self.pp > 1 and self.num_microbatches > 1:
            raise ValueError(
                f"ParallelPlan: num_microbatches is {self.num_microbatches} with pp {self.pp}; "
                "give PipelineOptions(num_microbatches=...) instead"
            )

    def _check_zero(self) -> None:
        self.zero.validate("ParallelPlan: zero.")
        for name, instead in (
            ("max_grad_norm", "ParallelPlan(max_grad_norm=...)"),
            ("precision", "ParallelPlan(precision=...)"),
            ("initialize", "a folder or a model with values"),
        ):
            if getattr(self.zero, name) is not None:
                raise ValueError(
                    f"ParallelPlan: zero has {name}={getattr(self.zero, name)!r}; give {instead}"
                )
        if self.zero.reduction != "mean":
            raise ValueError(
                "ParallelPlan: zero has reduction='sum'; leave it out: losses are divided by the "
                "tokens of all ranks"
            )
        if self.pipeline.gather_once and self.zero.stage < 3:
            raise ValueError(
                "PipelineOptions: gather_once is True, but zero.stage is "
                f"{self.zero.stage}, where parameters are whole anyway; leave it out, or set "
                "zero.stage to 3"
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(
                f"ParallelPlan: max_grad_norm is {self.max_grad_norm}; give a positive number, or "
                "None not to clip"
            )


ONE_RANK = ParallelPlan()


def _check_count(what: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what} is {value!r}; give a whole number, {least} or more")
