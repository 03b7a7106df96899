"""Collectives over symmetric memory: the GPUs of one node read and write each other's memory.

| file | what it does |
|---|---|
| memory.py | one rank's end: buffers made and freed, sums over them |
"""

from pyops.comm.collectives.symmetric.memory import (
    DTYPES,
    SymmetricBuffer,
    SymmetricMemory,
    Unavailable,
    memory_of,
    symmetric_empty,
)

__all__ = [
    "DTYPES",
    "SymmetricBuffer",
    "SymmetricMemory",
    "Unavailable",
    "memory_of",
    "symmetric_empty",
]
