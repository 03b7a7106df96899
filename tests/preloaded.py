"""What the fork server of the ranks imports before it forks the first of them.

    fork server    imports, then gc.freeze
       |--- rank 0     its garbage collector looks through what the rank itself has made, and
       |--- rank 1     not through 400,000 objects of modules, which would take half a second
       `--- ...        and a copy of each page of memory that holds one of the objects

This module is for the fork server alone: whoever imports it imports all of that.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

gc.disable()  # one collection after all imports is enough
from tests.workers import PRELOADED  # noqa: E402 - not before the collector rests

for name in PRELOADED:
    with contextlib.suppress(ImportError):  # a rank that needs the module says so
        importlib.import_module(name)
gc.collect()
gc.freeze()
gc.enable()
