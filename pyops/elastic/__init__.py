"""Elastic training: freeze what has converged, pack the rest on fewer ranks, give the ranks set
free to new replicas.

    elastic = Elastic(
        {"embedding": ..., "blocks.0": ..., "head": ...},
        optimizer=..., loss=..., data=ElasticData(samples=256, batch=32, seed=0),
        policy=GradientNorm(1 / 5), run=ElasticRun(stages=2),
    )
    for share in elastic.shares():
        elastic.step(*rows_of(*indices_of(share.samples)), share=share, lr=...)
    change = elastic.decide()                  freezes, packs, moves layers and their states

After PipeTransformer (He et al., 2021). `Elastic` puts these together; each can be used alone:

    norms = meter.take()                       Meter(blocks): gradient norms since a decision
    frozen = policy.decide(norms, frozen)      GradientNorm(1 / 5), Bound, PercentileOfChange
    agree_on(frozen, group)                    or an error on every rank
    pack(costs, frozen=..., stages=8)          -> Packing: stages, boundaries, micro-batches
    Layout(ranks, stages, replicas, ...)       which rank holds which layers
    carry(state, old, new, group=...)          each layer's state to the ranks that need it
    LayoutGroups(layout, control_group=...)    this rank's process groups in it
    Sampler(samples, batch=..., ...).next()    this replica's share of the next batch
    FrozenLayers(layers, cache=cache)          the frozen layers as one: computed, or read
    choose(ranks, wanted=Grid(tp=2), ...)      tp, pp and dp for the ranks at hand
    plot_elastic(path, rows, ranks=4, ...)     a run as a picture
    forecast(costs, policy=..., run=...)       -> what each epoch would take, simulated

| folder or file | what it does |
|---|---|
| policy | how many layers are frozen, and the norms by which that is decided |
| planning | stages and micro-batches for the layers that are left, and what they would bring |
| layout | which rank holds what and takes which samples; the way to the next layout |
| frozen | outputs of frozen layers: computed, or kept and read, whichever is faster |
| runtime | Elastic: what users call, and what a rank holds and does in one layout |
| membership.py | a layout for the ranks that are left, or have come back |
| picture.py | a run drawn |
"""

from pyops.elastic.config import ElasticCallbacks, ElasticConfig, ElasticData, ElasticRun
from pyops.elastic.frozen.activation_cache import ActivationCache, open_cache
from pyops.elastic.frozen.cache_timing import CacheTimes, measure, reading_pays
from pyops.elastic.frozen.frozen_layers import FrozenLayers
from pyops.elastic.frozen.host_cache import CacheOptions
from pyops.elastic.layout.layer_moves import LayerMove, carry, moves, transition
from pyops.elastic.layout.padded_batch import PADDING, PaddedBatch, Step, indices_of
from pyops.elastic.layout.process_groups import LayoutGroups, abort_on_failure, make_control_group
from pyops.elastic.layout.rank_layout import Layout
from pyops.elastic.layout.sampler import ReplicaBatch, Sampler
from pyops.elastic.membership import Choice, Grid, Limits, choose
from pyops.elastic.picture import plot_elastic
from pyops.elastic.planning.confirmation import confirm
from pyops.elastic.planning.forecasting import Epoch, ForecastRun, forecast
from pyops.elastic.planning.overhead import machine_of, rows_besides
from pyops.elastic.planning.packing import Packing, frozen_share, pack
from pyops.elastic.planning.packing_config import Machine, PackingConfig
from pyops.elastic.policy.freeze_policies import (
    Bound,
    Callback,
    GradientNorm,
    PercentileOfChange,
    Policy,
    agree_on,
)
from pyops.elastic.policy.gradient_meter import Meter
from pyops.elastic.runtime.elastic import Elastic
from pyops.elastic.runtime.layout_change import LayoutChange
from pyops.renamed import missing_attribute

__all__ = [
    "PADDING",
    "ActivationCache",
    "Bound",
    "CacheOptions",
    "CacheTimes",
    "Callback",
    "Choice",
    "Elastic",
    "ElasticCallbacks",
    "ElasticConfig",
    "ElasticData",
    "ElasticRun",
    "Epoch",
    "ForecastRun",
    "FrozenLayers",
    "GradientNorm",
    "Grid",
    "LayerMove",
    "Layout",
    "LayoutChange",
    "LayoutGroups",
    "Limits",
    "Machine",
    "Meter",
    "Packing",
    "PackingConfig",
    "PaddedBatch",
    "PercentileOfChange",
    "Policy",
    "ReplicaBatch",
    "Sampler",
    "Step",
    "abort_on_failure",
    "agree_on",
    "carry",
    "choose",
    "confirm",
    "forecast",
    "frozen_share",
    "indices_of",
    "machine_of",
    "make_control_group",
    "measure",
    "moves",
    "open_cache",
    "pack",
    "plot_elastic",
    "reading_pays",
    "rows_besides",
    "transition",
]


def __getattr__(name: str) -> object:
    raise missing_attribute(__name__, name)
