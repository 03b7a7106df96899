"""Collectives over symmetric memory: the GPUs of one node read and write each other's memory.

| file | what it does |
|---|---|
| buffer.py | SymmetricBuffer: memory of this rank that the others see, and its collectives |
| memory.py | SymmetricMemory: one rank's end, its buffers and the sums over them |
"""

from pyops.comm.collectives.symmetric.buffer import SymmetricBuffer
from pyops.comm.collectives.symmetric.memory import (
    DTYPES,
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
