"""What a process group needs beside itself to run collectives.

| file | what it does |
|---|---|
| communicator.py | Communicator: one rank's state for one group, and how a collective is run |
"""

from pyops.comm.collectives.communicator.communicator import ALGORITHMS, Communicator, release

__all__ = ["ALGORITHMS", "Communicator", "release"]
