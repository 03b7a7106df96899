"""Adafactor, over whole tensors and over parts of them.

| file | what it does |
|---|---|
| adafactor.py | the optimizer |
| parts.py | its step where each process has a range of every flattened tensor |
"""

from pyops.optim.adafactor.adafactor import Adafactor

__all__ = ["Adafactor"]
