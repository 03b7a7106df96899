"""The layouts that there are for a CoAtNet.

tp    divisors of all heads and inner channels, up to a node     dp    what is left of the ranks
pp    up to the layers, by 1f1b, where norms see one image       zero  0 to 3; 0 or 1 with pp
micro-batch: powers of two                                       recompute: nothing, blocks
"""

from __future__ import annotations

from collections.abc import Iterator

from pyops.plan.costs.images import ImageCase
from pyops.plan.layout import Layout
from pyops.plan.layouts.options import Options

__all__ = ["image_layouts"]

MICRO_BATCHES = tuple(2**i for i in range(13))
SCHEDULE = "1f1b"


def image_layouts(case: ImageCase, options: Options, batch: int) -> Iterator[Layout]:
    """All that make a whole grid and share the images of a batch.

    Args:
        case: The model, the cluster, the program.
        options: What may be computed again.
        batch: Images of a step.
    """
    ranks, shape = case.cluster.num_devices, case.shape
    # A batch norm sees a micro-batch, which a pipeline makes smaller: another model.
    stages = [1] if shape.config.norm == "batch" else list(range(1, shape.num_layers + 1))
    for t in range(1, min(ranks, case.cluster.devices_per_node) + 1):
        if ranks % t or shape.most_ranks_of_tp % t:
            continue
        for p in stages:
            if ranks % (t * p) or batch % (ranks // (t * p)):
                continue
            base = Layout(tp=t, pp=p, dp=ranks // (t * p), schedule=SCHEDULE if p > 1 else "none")
            yield from _variants(base, options, batch // base.dp)


def _variants(base: Layout, options: Options, rows: int) -> Iterator[Layout]:
    stages = (0,) if base.copies == 1 else (0, 1) if base.pp > 1 else (0, 1, 2, 3)
    for b in MICRO_BATCHES:
        if rows % b or rows // b < base.pp:
            continue
        for zero in stages:
            for recompute in options.recompute:
                if recompute != "attention":  # it is fused, and has little to compute again
                    yield Layout(
                        tp=base.tp,
                        pp=base.pp,
                        dp=base.dp,
                        schedule=base.schedule,
                        micro_batch=b,
                        num_microbatches=rows // b,
                        zero=zero,
                        recompute=recompute,
                    )
