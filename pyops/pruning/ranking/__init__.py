"""Which weights stay: by their magnitude, exact on any layout."""

from pyops.pruning.ranking.rule import magnitude
from pyops.pruning.ranking.structures import Structure
from pyops.pruning.ranking.threshold import kth_magnitude

__all__ = ["Structure", "kth_magnitude", "magnitude"]
