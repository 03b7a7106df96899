"""Collectives that send a codec's payloads in place of numbers.

| file | what it does |
|---|---|
| functional.py | compressed_all_reduce, compressed_reduce_scatter, compressed_all_gather |
| between_nodes.py | the all-reduce whose payloads go between nodes only |
| call.py | what each of them needs of its group: communicator, agreement, transport, memory |
| host_transport.py | payloads on a GPU over a group of CPU tensors |
"""

from pyops.comm.compression.compressed.functional import (
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
)

__all__ = ["compressed_all_gather", "compressed_all_reduce", "compressed_reduce_scatter"]
