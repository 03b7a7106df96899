"""Optimizer states in host memory or in files, stepped tile by tile.

| file | what it does |
|---|---|
| async_file.py | AsyncFile: tensors read from and written to a file while the program computes |
"""

from __future__ import annotations

from pyops.offload.async_file import AsyncFile

__all__ = ["AsyncFile"]
