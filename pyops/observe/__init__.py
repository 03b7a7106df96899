"""Seeing what happens: who waits for whom in collectives, where a step spends its time, a run on
one page.

    pyops.flight_record  ->  flight: read, explained, watched
    steps                ->  profile: parts, operations, memory, a trace of all ranks
    a run's folder       ->  page: run.html
"""

from pyops.observe.flight.reading import FlightError, RankRecord, read_records
from pyops.observe.flight.verdict import Finding, explain, findings
from pyops.observe.flight.watch import watched
from pyops.observe.page import write_page
from pyops.observe.profile.measuring import StepProfile, profile_steps
from pyops.observe.replicas import OddReplica, compare_replicas
from pyops.observe.spikes import SpikeDetector
from pyops.observe.stragglers import Stragglers

__all__ = [
    "Finding",
    "FlightError",
    "OddReplica",
    "RankRecord",
    "SpikeDetector",
    "StepProfile",
    "Stragglers",
    "compare_replicas",
    "explain",
    "findings",
    "profile_steps",
    "read_records",
    "watched",
    "write_page",
]
