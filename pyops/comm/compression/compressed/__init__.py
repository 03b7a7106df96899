"""Collectives that send a codec's payloads in place of numbers.

| file | what it does |
|---|---|
| functional.py | compressed_all_reduce, compressed_reduce_scatter, compressed_all_gather |
"""

from pyops.comm.compression.compressed.functional import (
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
)

__all__ = ["compressed_all_gather", "compressed_all_reduce", "compressed_reduce_scatter"]
