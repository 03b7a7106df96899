"""Options of an elastic run.

ElasticConfig       when layers are frozen, what is cached, what free ranks do    [elastic] in TOML
ElasticData         the samples and how many make a batch
ElasticRun          stages, device and limits, which in TOML belong to other sections
ElasticCallbacks    functions that the run calls
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from pyops.elastic.frozen.host_cache import CacheOptions
from pyops.elastic.layout.layer_memory import Initialize
from pyops.elastic.layout.padded_batch import PaddedBatch
from pyops.elastic.planning.packing_config import PackingConfig
from pyops.elastic.planning.trial import RowsOf
from pyops.elastic.policy.freeze_policies import Bound, GradientNorm, PercentileOfChange, Policy
from pyops.pipeline import Profile

__all__ = [
    "BATCH_POLICIES",
    "CACHES",
    "FREEZES",
    "LR_RULES",
    "RENAMED",
    "BeforeForward",
    "ElasticCallbacks",
    "ElasticConfig",
    "ElasticData",
    "ElasticRun",
]

FREEZES = ("none", "gradient_norm", "bound", "percentile")
CACHES = ("auto", "on", "off")
CACHE_DTYPES = ("same", "bf16")
BATCH_POLICIES = ("global", "replica")
LR_RULES = ("linear", "sqrt", "constant")

BeforeForward = Callable[[Sequence[str], Sequence[nn.Module], PaddedBatch, int], None]


@dataclass(frozen=True)
class ElasticConfig:
    """Layers that have converged are frozen from the bottom up, the others packed on fewer ranks of
    the pipeline, and the ranks set free become replicas (PipeTransformer; He et al., 2021).

    This is the [elastic] section of a TOML file too: docs/elastic.md.
    """

    freeze: str = "none"
    """The policy: "none" freezes nothing; "gradient_norm", the paper's rule; "bound", its first
    term alone; "percentile", of the changes of gradient norms. Elastic(policy=) takes its place."""

    alpha: float = 0.2
    """Of "gradient_norm" and "bound": the part of the active blocks that one decision may freeze;
    1/5 is what the paper found to cost no accuracy."""

    percent: float = 50.0
    """Of "percentile": which percentile, from 0 to 100."""

    every: int = 0
    """Steps between two decisions; 0: one at the end of each epoch."""

    cache: str = "auto"
    """Whether the frozen layers' output of each sample is kept and read: "auto" where that is
    measured to be faster than computing it, "on" always, "off" never."""

    cache_gib: float = 0.0
    """Memory for the cache on each host, in GiB; 0: half of what is free."""

    cache_dtype: str = "same"
    """"same" keeps the bits that were computed, "bf16" takes half the memory."""

    cache_folder: str = ""
    """On a fast disk of each host, for a file that takes what the memory does not; empty: none."""

    batch_policy: str = "global"
    """"global" keeps the batch of all replicas together, and with it the losses; "replica" that of
    each, so that the global one grows with them, and the learning rate by lr_rule."""

    lr_rule: str = "linear"
    """How the learning rate grows with the batch: "linear", "sqrt" or "constant"."""

    compress: bool = True
    """False keeps the number of stages as it is."""

    replicate: bool = True
    """False leaves ranks that are set free idle."""

    rows_besides: float = 8.0
    """What a micro-batch costs the model besides its rows, in rows: decides into how many a batch
    is cut. 0: measured when the run of a TOML file begins; two runs may then be cut differently,
    and differ in their last bits."""

    trial: bool = False
    """Whether the best numbers of micro-batches are tried in each layout, which takes
    ElasticCallbacks.rows_of; the layout, and with it last bits, then depend on the clock."""

    def validate(self, prefix: str = "Elastic: ") -> None:
        """Check every field. Local: no rank is asked.

        Args:
            prefix: Begins the message, before the name of the field.

        Raises:
            ValueError: Naming field, value and what it must be.
        """
        for name, known in (
            ("freeze", FREEZES),
            ("cache", CACHES),
            ("cache_dtype", CACHE_DTYPES),
            ("batch_policy", BATCH_POLICIES),
            ("lr_rule", LR_RULES),
        ):
            self._require(prefix, name, getattr(self, name) in known, f"one of {', '.join(known)}")
        fits = 1e-6 <= self.alpha <= 1 - 1e-6
        self._require(prefix, "alpha", fits, "more than 0 and less than 1, such as 0.2")
        self._require(prefix, "percent", 0 <= self.percent <= 100, "a percentile from 0 to 100")
        for name in ("every", "cache_gib", "rows_besides"):
            self._require(prefix, name, getattr(self, name) >= 0, "0 or more")

    def _require(self, prefix: str, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{prefix}{name} is {getattr(self, name)!r}; it must be {expected}")

    @property
    def on(self) -> bool:
        """Whether `freeze` names a policy."""
        return self.freeze != "none"

    def policy(self) -> Policy | None:
        """The policy that `freeze` names; None freezes nothing."""
        if self.freeze == "percentile":
            return PercentileOfChange(self.percent)
        kinds = {"gradient_norm": GradientNorm, "bound": Bound}
        return kinds[self.freeze](self.alpha) if self.on else None

    def cache_options(self, rows_of: RowsOf | None) -> CacheOptions:
        """The cache's options; off where no function gives the rows by which it is measured.

        Raises:
            ValueError: for cache="on" without such a function.
        """
        if self.cache == "off" or (rows_of is None and self.cache == "auto"):
            return CacheOptions()
        if rows_of is None:
            raise ValueError(
                "cache is 'on', which needs an example of rows; give "
                "callbacks=ElasticCallbacks(rows_of=...)"
            )
        given = rows_of

        def example(samples: torch.Tensor) -> tuple[Any, Mapping[str, Any]]:
            inputs, _, named = given(PaddedBatch(samples, 0, len(samples), 0, 0, len(samples)))
            return inputs, named

        return CacheOptions(
            self.cache,
            example,
            budget=int(self.cache_gib * 2**30) or None,
            stored=torch.bfloat16 if self.cache_dtype == "bf16" else None,
            disk=self.cache_folder or None,
        )


@dataclass(frozen=True, kw_only=True)
class ElasticData:
    """The samples of a run, which are known by their numbers."""

    samples: int
    """How many there are to train on."""

    batch: int
    """Samples of a step, of all replicas at the start."""

    seed: int
    """Seed of their order: see `Sampler`."""

    held_out: int = 0
    """How many samples `evaluate(cached=True)` uses."""

    terms: int = 1
    """Terms of each row's loss: gradients are of the sum over the batch, divided by batch *
    terms."""


@dataclass(frozen=True, kw_only=True)
class ElasticRun:
    """How the layers are spread and stepped."""

    stages: int = 1
    """Pipeline stages of each replica at the start; the number of ranks must be a multiple."""

    context: int = 1
    """Neighboring ranks that hold the same layers and share out the tokens of each sample, in every
    layout: layers are of a model made with `ContextRanks` of them, and what `loss` and scores give
    is a summand of the ranks. Nothing is cached then."""

    tensor: int = 1
    """Neighboring ranks that share the weights of the same layers and are given the same samples:
    layers are of a model made with a group or a grid of them, whose placements say who holds what,
    and what `loss` and scores give is the same on each. Nothing is frozen then."""

    schedule: str = "1f1b"
    """"1f1b" or "gpipe", which work with every number of stages."""

    device: torch.device | str = "cpu"
    """The device of layers that come with memory, and where the others get it."""

    max_grad_norm: float | None = None
    """The 2-norm to which gradients are clipped; None: they are not."""

    chunk: int | None = None
    """Rows that the frozen layers compute at a time, of a size that does not change with the
    layout,
    so that a sample's bits don't: see `FrozenLayers`. None: rows of a micro-batch at the start."""

    idle_timeout: float = 86400.0
    """Seconds that a rank without work waits for a decision. A rank that dies is noticed at once,
    and one that only hangs after the default group's timeout by those that have work."""

    costs: Profile | Sequence[float] | None = None
    """What each layer costs, for `pack`: a Profile, or numbers; None: the numbers of their
    parameters."""

    packing: PackingConfig | None = None
    """Options of `pack`. With machine=None a micro-batch costs a stage as much as one sample
    more."""

    cache: CacheOptions | None = None
    """The cache's options in place of those of ElasticConfig."""


@dataclass(frozen=True, kw_only=True)
class ElasticCallbacks:
    """Functions that a run calls; they are given by every rank."""

    initialize: Initialize | None = None
    """(name, layer) -> None: fills a layer that is on the meta device with its first values, and
    buffers that no state_dict has."""

    before_forward: BeforeForward | None = None
    """(names, layers, portion, micro-batch) before each forward of a stage's active layers: sets
    the
    keys of their dropout."""

    rows_of: RowsOf | None = None
    """A portion -> (inputs, target, named arguments) of its rows, as in a step: used to measure the
    cache, and by ElasticConfig.trial."""


def _fields_of(argument: str, kind: type[Any]) -> dict[str, str]:
    return {each.name: f"{argument}={kind.__name__}({each.name}=...)" for each in fields(kind)}


RENAMED = {
    **_fields_of("config", ElasticConfig),
    **_fields_of("data", ElasticData),
    **_fields_of("run", ElasticRun),
    **_fields_of("callbacks", ElasticCallbacks),
    "initialise": "callbacks=ElasticCallbacks(initialize=...)",
    "before": "callbacks=ElasticCallbacks(before_forward=...)",
    "trial": "config=ElasticConfig(trial=True), callbacks=ElasticCallbacks(rows_of=...)",
}
"""Keywords that Elastic had, and what to write instead."""
