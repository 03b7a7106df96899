"""Downpour SGD: replicas that compute on their own clocks, and shards that hold the parameters.

    replica 0   |  fetch  compute  push  compute  push ...        own steps between fetches
    replica 1   |     fetch   compute   push ...                  joins, leaves or dies at any time
    shard 0     |  w[0:n]  <- Adagrad <- pushes, in order of arrival
    shard 1     |  w[n:2n] <- Adagrad <- pushes                   independent of shard 0

Dean et al., Large scale distributed deep networks, NeurIPS 2012, section 4.1.

| file | what it does |
|---|---|
| config.py | DownpourConfig of a replica, ShardConfig of a shard |
| messages.py, vectors.py | headers; how numbers are cut, checked and written for the wire |
| shard.py, endpoint.py | what a shard does with a push and a fetch; its end of a session |
| client.py, connecting.py | what a replica does in a step; its sessions with the shards |
| serving.py, snapshots.py | the process of a shard, and what it leaves for the next one |
| sessions/ | how a replica and a shard talk |
| leases.py | samples for free replicas |
| virtual_time.py | the same over simulated workers and links |
"""

from pyops.parameter_server.client import Client
from pyops.parameter_server.config import ConnectConfig, DownpourConfig, ShardConfig
from pyops.parameter_server.connecting import connect
from pyops.parameter_server.leases import Leases
from pyops.parameter_server.messages import Links, Pending, Reply, Request
from pyops.parameter_server.serving import HostedShard, ServerConfig, ShardReport, serve, stop
from pyops.parameter_server.shard import ParameterShard
from pyops.parameter_server.virtual_time import Clock, VirtualTime, VirtualWorker

__all__ = [
    "Client",
    "Clock",
    "ConnectConfig",
    "DownpourConfig",
    "HostedShard",
    "Leases",
    "Links",
    "ParameterShard",
    "Pending",
    "Reply",
    "Request",
    "ServerConfig",
    "ShardConfig",
    "ShardReport",
    "VirtualTime",
    "VirtualWorker",
    "connect",
    "serve",
    "stop",
]
