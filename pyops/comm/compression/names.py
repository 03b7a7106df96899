"""The names of the codecs, as a configuration gives them."""

from __future__ import annotations

from collections.abc import Callable

from pyops.comm.compression.codec import Codec
from pyops.comm.compression.eight_bit import FP8, Int4, Int8
from pyops.comm.compression.floats import BF16, Identity
from pyops.comm.compression.one_bit import OneBit
from pyops.comm.compression.power_sgd import PowerSGD
from pyops.comm.compression.topk import TopK

__all__ = ["parse"]


def parse(text: str) -> Codec:
    """The codec of a name as a configuration gives it. ValueError lists the names."""
    known: dict[str, Callable[[], Codec]] = {
        "none": Identity,
        "identity": Identity,
        "bf16": BF16,
        "int8": Int8,
        "int4": Int4,
        "fp8": FP8,
        "onebit": OneBit,
        "fp8_e5m2": lambda: FP8(format="e5m2"),
        "onebit_tensor": lambda: OneBit(block=None),
        "topk": TopK,
        "power_sgd": PowerSGD,
    }
    if not isinstance(text, str) or text not in known:
        raise ValueError(f"there is no codec {text!r}; choose one of {', '.join(known)}")
    return known[text]()
