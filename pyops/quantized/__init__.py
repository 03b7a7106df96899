"""Models of fewer bits: weights, and if wanted activations, as integers with scales.

| file | what it does |
|---|---|
| formats.py | int8, int4, fp8: how numbers become codes and scales, exactly |
| linear_layers.py | the linear layers of a model, as matrices |
| calibration/ | scales of inputs, SmoothQuant, AWQ and GPTQ, from examples |
| fake_layers.py | weights and inputs as their codes would give them back |
| training.py | training with quantization in mind |
"""

from pyops.quantized.calibration import (
    Calibration,
    GPTQConfig,
    Histogram,
    InputRange,
    awq,
    calibrate,
    gptq,
    gptq_codes,
    smooth,
)
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
from pyops.quantized.training import Aware, aware

__all__ = [
    "FP8",
    "Aware",
    "Calibration",
    "Codes",
    "GPTQConfig",
    "Histogram",
    "InputRange",
    "Int4",
    "Int8",
    "IntN",
    "Scheme",
    "aware",
    "awq",
    "calibrate",
    "decode",
    "encode",
    "gptq",
    "gptq_codes",
    "smooth",
]
