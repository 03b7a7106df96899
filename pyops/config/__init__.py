"""A run's configuration: a TOML file, whose sections are the frozen dataclasses of the rooms they
configure.

    name = "small"          # outputs go to <train.folder>/<name>/
    [model]                 # pyops.models.GPTConfig
    [data]                  # pyops.data.DataConfig
    [optimizer]             # OptimizerConfig
    [communication]         # CommunicationConfig
    [precision]             # PrecisionConfig
    [zero]                  # ZeroConfig
    [recompute]             # RecomputeConfig
    [parallel]              # pyops.config.parallel.ParallelConfig
    [elastic]               # ElasticConfig
    [train]                 # TrainConfig
    [task]                  # TaskConfig; [vit] is pyops.models.ViTConfig, [bert] pyops.models.BERTConfig

`load_config(path, overrides=["train.steps=10"])` reads it. What is wrong is a ConfigError that
names the key, its value and the fix; nothing has been started by then.
"""

from pyops.config.elastic import ElasticConfig
from pyops.config.parallel import ParallelConfig
from pyops.config.reading import load_config
from pyops.config.refusal import ConfigError
from pyops.config.sections import (
    COMMUNICATING,
    OPTIMIZERS,
    CommunicationConfig,
    OptimizerConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
    ZeroConfig,
)
from pyops.config.task import TaskConfig
from pyops.config.whole import Config

__all__ = [
    "COMMUNICATING",
    "OPTIMIZERS",
    "CommunicationConfig",
    "Config",
    "ConfigError",
    "ElasticConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "TaskConfig",
    "TrainConfig",
    "ZeroConfig",
    "load_config",
]
