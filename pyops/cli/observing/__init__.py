"""What is seen of a run: `pyops profile`, `flight`, `replay` and `page`.

| file | command |
|---|---|
| profiling.py | profile: where a step spends its time |
| records.py | flight, replay, page: what a run leaves in its folder |
"""

from pyops.cli.observing.profiling import add_profile, profile
from pyops.cli.observing.records import add_flight, add_page, add_replay, flight, page, replay

__all__ = [
    "add_flight",
    "add_page",
    "add_profile",
    "add_replay",
    "flight",
    "page",
    "profile",
    "replay",
]
