"""Compression: a folder's model becomes smaller or cheaper step by step, with what each step costs
and saves measured; `pyops compress CONFIG.toml`.

    report = compress(load_compress_config("compress.toml"))
    print(report.table())

| file | what it does |
|---|---|
| steps.py | the steps' options, and the orders that have a sense |
| settings.py | the TOML file |
| text.py | rows to learn from, to calibrate on, held out |
| methods/ | what each step does to a model |
| learning.py | the steps of an optimizer that methods share |
| folders.py | models between the steps, on disk |
| measuring.py | bytes, loss, accuracy, latency |
| report.py, picture.py | the table, JSON, the picture |
| run.py | all of it |
| use.py | generate and eval of folders that are packed or quantized |
"""

from pyops.compress.folders import load_model
from pyops.compress.measuring import Spread
from pyops.compress.report import CompressReport, StageReport
from pyops.compress.run import compress
from pyops.compress.settings import (
    CompressConfig,
    CompressData,
    CompressModel,
    MeasureConfig,
    compress_config_of,
    load_compress_config,
)
from pyops.compress.steps import (
    DistillStep,
    FinetuneStep,
    LayersStep,
    PruneStep,
    QuantizeStep,
    Step,
)
from pyops.compress.use import use_of

__all__ = [
    "CompressConfig",
    "CompressData",
    "CompressModel",
    "CompressReport",
    "DistillStep",
    "FinetuneStep",
    "LayersStep",
    "MeasureConfig",
    "PruneStep",
    "QuantizeStep",
    "Spread",
    "StageReport",
    "Step",
    "compress",
    "compress_config_of",
    "load_compress_config",
    "load_model",
    "use_of",
]
