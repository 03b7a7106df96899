"""Which weights stay: by their magnitude, exact on any layout."""

from pyops.pruning.magnitude.magnitude import magnitude
from pyops.pruning.magnitude.structures import Structure
from pyops.pruning.magnitude.threshold import kth_magnitude

__all__ = ["Structure", "kth_magnitude", "magnitude"]
