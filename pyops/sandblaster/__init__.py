"""Sandblaster L-BFGS: a coordinator without parameters, shards that hold all vectors, workers that
compute portions of one large batch.

    coordinator   small commands and numbers       take, direct, trial, finish
    shards        x, d, s_1 y_1 ... s_m y_m, g     each its part, on which it carries commands out
    workers       portions of the batch            whoever is free; backups of what is outstanding

Dean et al., Large scale distributed deep networks, NeurIPS 2012, section 4.2.

| file | what it does |
|---|---|
| config.py | SandblasterConfig |
| sums.py | sums over portions along a fixed tree |
| shard.py | what a shard does with a command |
| portions.py | what a worker computes |
| coordinator.py | L-BFGS over a cluster |
| store_cluster.py, holding.py, working.py | the processes of the coordinator, a shard, a worker |
| virtual_time.py | the same over simulated workers |
"""

from pyops.sandblaster.config import SandblasterConfig
from pyops.sandblaster.coordinator import Cluster, Coordinator, Iteration
from pyops.sandblaster.holding import hold
from pyops.sandblaster.portions import PortionLoss
from pyops.sandblaster.shard import VectorShard
from pyops.sandblaster.store_cluster import StoreCluster
from pyops.sandblaster.virtual_time import VirtualCluster, VirtualPace
from pyops.sandblaster.working import WorkReport, work

__all__ = [
    "Cluster",
    "Coordinator",
    "Iteration",
    "PortionLoss",
    "SandblasterConfig",
    "StoreCluster",
    "VectorShard",
    "VirtualCluster",
    "VirtualPace",
    "WorkReport",
    "hold",
    "work",
]
