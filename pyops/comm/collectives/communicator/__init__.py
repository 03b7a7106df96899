"""What a process group needs beside itself to run collectives.

| file | what it does |
|---|---|
| communicator.py | Communicator: one rank's state for one group, and how a collective is run |
| fingerprint.py | what ranks compare before they run a collective |
| candidates.py | the algorithms among which "auto" chooses |
| side_streams.py | the CUDA stream of asynchronous collectives |
| departures.py | notes of the ranks that left |
"""

from pyops.comm.collectives.communicator.communicator import (
    ALGORITHMS,
    Communicator,
    groups_in_use,
    release,
)

__all__ = ["ALGORITHMS", "Communicator", "groups_in_use", "release"]
