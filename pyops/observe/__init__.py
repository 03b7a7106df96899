"""Seeing what happens: who waits for whom in collectives, where a step spends its time, a run on
one page.

    pyops.flight_record  ->  flight: read, explained, watched
"""

from pyops.observe.flight.reading import FlightError, RankRecord, read_records
from pyops.observe.flight.verdict import Finding, explain, findings
from pyops.observe.flight.watch import watched

__all__ = [
    "Finding",
    "FlightError",
    "RankRecord",
    "explain",
    "findings",
    "read_records",
    "watched",
]
