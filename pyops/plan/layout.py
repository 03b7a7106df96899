"""Layout: one way to share a training out over ranks; Software: what the program that runs it does.

    ranks = tp x cp x pp x dp        rows of a step = dp x num_microbatches x micro_batch

The ranks of tp are neighbors, those of cp lie tp apart, those of dp tp x cp, those of pp outermost,
as in `pyops.mesh`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pyops.plan.shapes import PlanError

__all__ = [
    "FSDP",
    "MEGATRON",
    "MEGATRON_CORE",
    "PYOPS",
    "RECOMPUTE",
    "SCHEDULES",
    "SEVERAL_STAGES",
    "Layout",
    "Software",
]

RECOMPUTE = ("none", "attention", "block")
"""What is computed again in backward: nothing, the core of attention, or whole blocks."""
SCHEDULES = ("none", "gpipe", "1f1b", "interleaved", "zb1p", "interleaved_zb", "zbv")
SEVERAL_STAGES = ("interleaved", "interleaved_zb")
METHODS = ("gather", "ring", "ulysses")
OFFLOADS = ("none", "cpu")
CODECS = ("none", "bf16", "int8", "onebit", "power_sgd", "topk")


@dataclass(frozen=True)
class Layout:
    """How ranks share a model and a batch; a step takes tp x cp x pp x dp ranks."""

    tp: int = 1
    """Ranks that cut each layer."""
    pp: int = 1
    """Ranks that hold different blocks."""
    dp: int = 1
    """Copies of the model, which see other rows."""
    zero: int = 0
    """The ZeRO stage of the copies."""
    micro_batch: int = 1
    """Rows of a micro-batch."""
    num_microbatches: int = 1
    """Micro-batches of a step and copy."""
    recompute: str = "none"
    """Of `RECOMPUTE`."""
    schedule: str = "none"
    """Of a pipeline: "gpipe", "1f1b", "interleaved", "zb1p", "interleaved_zb" or "zbv"."""
    stages_per_rank: int = 1
    """Of a pipeline: how many stages a rank has."""
    sequence_parallel: bool = False
    """Whether tp ranks keep their part of the tokens only between the layers."""
    cp: int = 1
    """Ranks that share out the tokens of each row."""
    cp_method: str = "gather"
    """How their attention sees all of them: "gather", "ring" or "ulysses"."""
    offload: str = "none"
    """Where optimizer states are kept: "none", beside the parameters, or "cpu"."""
    codec: str = "none"
    """What gradients travel as, of `CODECS`; with ZeRO 0 and whole copies of the model."""

    @property
    def copies(self) -> int:
        """Ranks that have the same parameters: of dp and cp."""
        return self.dp * self.cp

    @property
    def num_ranks(self) -> int:
        """That take part."""
        return self.tp * self.pp * self.copies

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return self.dp * self.num_microbatches * self.micro_batch

    @property
    def num_stages(self) -> int:
        """Of the pipeline, over all its ranks."""
        return self.pp * self.stages_per_rank

    @property
    def axes_used(self) -> int:
        """How many of tp, cp, pp, dp are more than one rank."""
        return (self.tp > 1) + (self.cp > 1) + (self.pp > 1) + (self.dp > 1)

    def __str__(self) -> str:
        sizes = (("tp", self.tp), ("cp", self.cp), ("pp", self.pp))
        parts = [f"{axis} {size}" for axis, size in sizes if size > 1]
        if self.dp > 1 or not parts:
            parts.append(f"dp {self.dp}")
        return " x ".join(parts)

    def validate(self) -> None:
        """Check every field, and what goes together.

        Raises:
            PlanError: Naming field, value and fix.
        """
        for name in ("tp", "cp", "pp", "dp", "micro_batch", "num_microbatches", "stages_per_rank"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"{name} is {value!r}; give a whole number, 1 or more")
        choices: tuple[tuple[str, tuple[Any, ...]], ...] = (
            ("zero", (0, 1, 2, 3)),
            ("recompute", RECOMPUTE),
            ("schedule", SCHEDULES),
            ("cp_method", METHODS),
            ("offload", OFFLOADS),
            ("codec", CODECS),
        )
        for name, known in choices:
            value = getattr(self, name)
            if isinstance(value, bool) or value not in known:
                raise PlanError(f"{name} is {value!r}; choose one of {', '.join(map(str, known))}")
        if (self.pp > 1) == (self.schedule == "none"):
            fix = 'give schedule="1f1b"' if self.pp > 1 else "leave schedule out"
            raise PlanError(f"schedule is {self.schedule!r} with pp {self.pp}; {fix}")
        stages = {"zbv": 2}.get(self.schedule, 1)
        if self.stages_per_rank != stages and self.schedule not in SEVERAL_STAGES:
            raise PlanError(
                f"stages_per_rank is {self.stages_per_rank}, but schedule {self.schedule!r} has "
                f"{stages} on a rank; leave it {stages}, or choose {' or '.join(SEVERAL_STAGES)}"
            )
        if self.sequence_parallel and self.tp == 1:
            raise PlanError("sequence_parallel is True with tp 1; set it False, or tp to 2 or more")
        self._check_together()

    def _check_together(self) -> None:
        if self.cp == 1 and self.cp_method != METHODS[0]:
            raise PlanError(
                f"cp_method is {self.cp_method!r} with cp 1; leave it out, or set cp to 2 or more"
            )
        if self.offload != "none" and not self.zero:
            raise PlanError(
                f"offload is {self.offload!r} with zero 0, where states lie beside the parameters; "
                "set zero to 1 or more"
            )
        if self.codec != "none" and (self.zero or self.num_ranks > self.dp or self.dp == 1):
            raise PlanError(
                f"codec is {self.codec!r}, but gradients travel compressed between whole copies "
                f"alone: this is {self}, ZeRO {self.zero}; leave codec out, or take dp and ZeRO 0"
            )

    def with_batch(self, rows: int) -> Layout:
        """The same with as many micro-batches as `rows` of a step need.

        Args:
            rows: Of a step.

        Raises:
            PlanError: The copies can't share them in micro-batches of this size.
        """
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise PlanError(f"batch is {rows!r}; give a whole number of rows, 1 or more")
        each = self.dp * self.micro_batch
        if rows % each:
            raise PlanError(
                f"batch is {rows} rows, which dp {self.dp} x micro_batch {self.micro_batch} = "
                f"{each} do not divide; give a multiple of {each}, or a smaller micro_batch"
            )
        return replace(self, num_microbatches=rows // each)


@dataclass(frozen=True)
class Software:
    """What the training program does, as far as memory and time depend on it."""

    name: str
    """For tables."""
    activations: str = "pyops"
    """Whose layers: "pyops" or "megatron" (Korthikanti et al., table 2, with dropout)."""
    fused_attention: bool = True
    """Whether scores are never in memory, and masked ones never computed."""
    attention: float = 0.0
    """Part of the peak that its fused attention reaches, of the scores that a causal mask leaves;
    0: as the device's file says."""
    elementwise_bytes: float = 20.0
    """Bytes that norms (8) and residual sums (12; 14 with dropout) of a block move in forward, for
    each token and unit of width, in 16 bits."""
    score_bytes: float = 13.0
    """Bytes that are moved for each score which is made in memory, in 16 bits: by two products (2
    each), masking and softmax (4), dropout (5)."""
    unfused: float = 1.0
    """How many times what is moved between the products is moved, by kernels that fuse less."""
    tensor_sum_bytes: int = 2
    """Bytes of an element that sums over tp ranks send."""
    tensor_overlap: float = 0.0
    """Which part of the messages of tp lies beside products."""
    gradient_bytes: int = 2
    """Bytes of an accumulated gradient."""
    parameter_bytes: int = 0
    """Bytes of a parameter that the copies keep; 0: as the precision says."""
    overlaps_gradients: bool = True
    """Whether the messages of dp lie beside the computation."""
    whole_logits: bool = False
    """Whether the loss makes the logits of all tokens, in fp32."""
    cuts_messages: bool = False
    """Whether the ranks of tp send each its part of a message of the pipeline, without sequence
    parallelism, too."""
    bucket_bytes: int = 25 << 20
    """Bytes of a message of ZeRO stages 0 to 2."""
    buckets_are_slices: bool = False
    """Whether a message of gradients is a part of where they lie, and no copy."""
    straggling: float = 0.005
    """Deviation of a rank's step, of which the slowest of all counts."""
    fragmentation: float = 1.05
    """What the allocator takes for each byte that is asked for."""


PYOPS = Software(
    "pyops", tensor_sum_bytes=4, tensor_overlap=0.5, unfused=2.0, buckets_are_slices=True
)
"""pyops: sums over tp ranks in fp32, half of them beside products; the loss without logits. What is
moved between the products is counted as of FSDP: unverified on GPU."""
MEGATRON = Software(
    "Megatron-LM, 2022",
    activations="megatron",
    fused_attention=False,
    elementwise_bytes=22.0,
    cuts_messages=True,
    gradient_bytes=4,
    whole_logits=True,
    overlaps_gradients=False,
    straggling=0.0,
)
"""Megatron-LM of 2021 and 2022: attention by products, gradients added up in fp32 and reduced when
all are there."""
MEGATRON_CORE = Software(
    "Megatron-core",
    activations="megatron",
    cuts_messages=True,
    gradient_bytes=4,
    whole_logits=True,
    bucket_bytes=512 << 20,
)
"""Megatron-core and what is like it: fused attention, gradients reduced in large buckets beside
backward."""
FSDP = Software("FSDP", whole_logits=True, gradient_bytes=4, parameter_bytes=4, unfused=2.0)
"""torch's FSDP under automatic mixed precision: parameters and gradients in fp32, kernels that fuse
little."""
