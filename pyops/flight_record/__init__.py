"""A record of the last collectives of each rank, in a file that outlives the process.

    program     all_reduce #41   all_reduce #42 ...        what `begin` and `finish` note
                     |                |
    rank3.flight  [header | entry | entry | ... ]          memory-mapped: a killed process leaves it

An entry has the operation, its bytes and dtype, the group and the number of the call within the
group, the line of the user's program, when it began and when it ended. Nothing has to be written
when a rank fails: the kernel keeps what the process wrote to the mapping. `pyops.observe` reads the
files of all ranks and says who waits for whom.
"""

from pyops.flight_record.call_log import Kind
from pyops.flight_record.frames import user_frame
from pyops.flight_record.noting import (
    active,
    begin_in,
    entered,
    inside,
    kind_in,
    message,
    recording,
    run_noted,
    waiting,
)
from pyops.flight_record.record import (
    ENTRY,
    FAILED,
    FINISHED,
    HEADER_BYTES,
    LIFE,
    LIFE_AT,
    RUNNING,
    FlightRecord,
)

__all__ = [
    "ENTRY",
    "FAILED",
    "FINISHED",
    "HEADER_BYTES",
    "LIFE",
    "LIFE_AT",
    "RUNNING",
    "FlightRecord",
    "Kind",
    "active",
    "begin_in",
    "entered",
    "inside",
    "kind_in",
    "message",
    "recording",
    "run_noted",
    "user_frame",
    "waiting",
]
