"""ElasticConfig: when layers are frozen, what is read from a cache instead of computed, and what
the ranks set free do."""

from __future__ import annotations

from dataclasses import dataclass

from pyops.config.config_error import require

__all__ = ["BATCH_POLICIES", "CACHES", "FREEZES", "LR_RULES", "ElasticConfig"]

FREEZES = ("none", "gradient_norm", "bound", "percentile")
CACHES = ("auto", "on", "off")
CACHE_DTYPES = ("same", "bf16")
BATCH_POLICIES = ("global", "replica")
LR_RULES = ("linear", "sqrt", "constant")


@dataclass(frozen=True)
class ElasticConfig:
    """Layers that have converged are frozen from the bottom up, the others packed on fewer ranks of
    the pipeline, and the ranks set free become replicas (PipeTransformer; He et al., 2021):
    docs/elastic.md.

    freeze: the policy of pyops.elastic: "none" freezes nothing, and all else here then says
    nothing; "gradient_norm", the paper's rule; "bound", its first term alone; "percentile", of the
    changes of gradient norms. alpha: of the first two, the part of the active blocks that one
    decision may freeze; 1/5 is what the paper found to cost no accuracy. percent: of the third.
    every: steps between two decisions; 0: one at the end of each epoch.

    cache: what the frozen layers say to each sample is kept and read: "auto" where that is measured
    to be faster than computing it, "on" always, "off" never. cache_gib: memory for it, on each
    host; 0: half of what is free. cache_dtype: "same" gives the bits that were computed, "bf16"
    takes half the memory. cache_folder: on a fast disk of each host, for a file that takes what the
    memory does not; empty: none.

    batch_policy: "global" keeps the batch of all replicas together, and with it the losses;
    "replica" that of each, so that the global one grows with them, and the learning rate by
    lr_rule: linear, sqrt or constant. compress: False keeps the stages as they are. replicate:
    False leaves ranks that are set free idle.

    rows_besides: what a micro-batch costs the model besides its rows, in rows: decides into how
    many a batch is cut. 0: measured when the run begins; two runs may then be cut differently, and
    differ in their last bits. trial: the best numbers of micro-batches are tried in each layout;
    the same is true then.
    """

    freeze: str = "none"
    alpha: float = 0.2
    percent: float = 50.0
    every: int = 0
    cache: str = "auto"
    cache_gib: float = 0.0
    cache_dtype: str = "same"
    cache_folder: str = ""
    batch_policy: str = "global"
    lr_rule: str = "linear"
    compress: bool = True
    replicate: bool = True
    rows_besides: float = 8.0
    trial: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("freeze", FREEZES),
            ("cache", CACHES),
            ("cache_dtype", CACHE_DTYPES),
            ("batch_policy", BATCH_POLICIES),
            ("lr_rule", LR_RULES),
        ):
            require(self, f"one of {', '.join(known)}", (name,), lambda v, known=known: v in known)
        require(
            self,
            "more than 0 and less than 1, such as 0.2",
            ("alpha",),
            lambda v: 1e-6 <= v <= 1 - 1e-6,
        )
        require(self, "a percentile from 0 to 100", ("percent",), lambda v: 0 <= v <= 100)
        require(self, "0 or more", ("every", "cache_gib", "rows_besides"), lambda v: v >= 0)

    @property
    def on(self) -> bool:
        """Whether anything may be frozen."""
        return self.freeze != "none"
