"""CoAtNet: convolution blocks, then transformer blocks with relative attention, over images."""

from pyops.models.coatnet.config import CoAtNetConfig
from pyops.models.coatnet.model import CoAtNet

__all__ = ["CoAtNet", "CoAtNetConfig"]
