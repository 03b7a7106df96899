"""Models of fewer bits: the weights of linear layers, and if wanted their inputs, as integers with
scales.

    report = convert(model, Scheme(weights=Int8(), activations=Int8(per="token")))    in place
    print(report)                                                  error and bytes of each layer
    save(model, folder); load(model, folder)                       at any number of ranks

| file | what it does |
|---|---|
| formats.py | int8, int4, fp8: how numbers become codes and scales, exactly |
| linear.py, linear_shape.py | the layer that computes with codes, also shared by ranks |
| layers.py | the layers of a model that can be converted, as matrices |
| calibration/ | ranges of inputs, SmoothQuant, AWQ and GPTQ, from examples |
| conversion.py, report.py | convert, and what it did to each layer |
| saving.py | folders of converted models |
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
from pyops.quantized.conversion import convert
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
from pyops.quantized.linear import QuantizedLinear
from pyops.quantized.report import LayerReport, Report
from pyops.quantized.saving import load, save
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
    "LayerReport",
    "QuantizedLinear",
    "Report",
    "Scheme",
    "aware",
    "awq",
    "calibrate",
    "convert",
    "decode",
    "encode",
    "gptq",
    "gptq_codes",
    "load",
    "save",
    "smooth",
]
