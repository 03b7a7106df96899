"""Quantization after training, with examples.

calibrate(model, batches)                    one range for each layer's input
smooth(model, batches)                       outliers of inputs move into the weights
awq(model, Int4(group=64), batches)          inputs that matter are scaled up before the rounding
gptq(model, Int4(group=64), batches)         column by column, errors taken up by the columns after

Order: smooth or awq, then gptq or to nearest.

| file | what it does |
|---|---|
| inputs.py | the inputs of linear layers while a model runs |
| over_ranks.py | what several ranks have seen, put together |
| histogram.py | counts of numbers by the first 16 bits of fp32 |
| ranges.py | ranges of inputs: five ways to find them |
| readers.py | which layers read a norm, and what folds into it |
| smoothing.py | SmoothQuant |
| activation_aware.py | AWQ |
| rounding.py | GPTQ of a matrix |
| block_rounding.py | GPTQ of a model |
"""

from pyops.quantized.calibration.activation_aware import awq
from pyops.quantized.calibration.block_rounding import gptq
from pyops.quantized.calibration.histogram import Histogram
from pyops.quantized.calibration.ranges import Calibration, InputRange, calibrate
from pyops.quantized.calibration.rounding import GPTQConfig, gptq_codes
from pyops.quantized.calibration.smoothing import smooth

__all__ = [
    "Calibration",
    "GPTQConfig",
    "Histogram",
    "InputRange",
    "awq",
    "calibrate",
    "gptq",
    "gptq_codes",
    "smooth",
]
