"""Sandblaster L-BFGS: a batch method over workers and shards, of which any worker may be slow or
die.

    coordinator   | direction | evaluate at t | evaluate | accept |      small commands alone
    shard 0       | point, direction, gradients, history: part 0  |      vectors stay here
    shard 1       | part 1                                        |
    workers       | parameters -> portion -> gradient -> shards   |      a free worker

Dean et al., Large scale distributed deep networks, NeurIPS 2012, section 4.2.

| file | what it does |
|---|---|
| config.py | SandblasterConfig |
| portions.py, tree_sum.py | who computes what; a sum whose bits no order of arrival changes |
| shard.py, worker.py | vectors and what is done with them; loss and gradient of a portion |
| coordinator.py | iterations and line searches |
| recovery.py | iterations that begin again where a shard or a coordinator is lost |
| remote.py, serving.py, working.py | the same over processes: coordinator, shard, worker |
| virtual_time.py | workers that are slow, die or hang, in one process |
"""

from pyops.sandblaster.config import SandblasterConfig
from pyops.sandblaster.coordinator import Coordinator, LocalShards, SandblasterReport, Shards
from pyops.sandblaster.portions import Portions
from pyops.sandblaster.recovery import RecoveringCoordinator, ShardRestartedError
from pyops.sandblaster.remote import RemoteBatch, RemoteShards, coordinate, stop
from pyops.sandblaster.serving import serve
from pyops.sandblaster.shard import Measures, VectorShard
from pyops.sandblaster.tree_sum import TreeSum
from pyops.sandblaster.virtual_time import VirtualBatch, VirtualMember
from pyops.sandblaster.worker import Worker
from pyops.sandblaster.working import work

__all__ = [
    "Coordinator",
    "LocalShards",
    "Measures",
    "Portions",
    "RecoveringCoordinator",
    "RemoteBatch",
    "RemoteShards",
    "SandblasterConfig",
    "SandblasterReport",
    "ShardRestartedError",
    "Shards",
    "TreeSum",
    "VectorShard",
    "VirtualBatch",
    "VirtualMember",
    "Worker",
    "coordinate",
    "serve",
    "stop",
    "work",
]
