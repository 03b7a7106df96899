"""Models of fewer bits: weights, and if wanted activations, as integers with scales.

| file | what it does |
|---|---|
| formats.py | int8, int4, fp8: how numbers become codes and scales, exactly |
"""

from pyops.quantized.formats import (
    FP8,
    Codes,
    Int4,
    Int8,
    IntN,
    Scheme,
    decode,
    encode,
)

__all__ = ["FP8", "Codes", "Int4", "Int8", "IntN", "Scheme", "decode", "encode"]
