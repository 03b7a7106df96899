"""A run's configuration: a TOML file, whose sections are the frozen dataclasses of the rooms they
configure.

    name = "small"     # outputs go to <train.folder>/<name>/
    [model]            # pyops.models.GPTConfig; with the key folder ModelFolder
    [adapter]          # AdapterConfig, with the key folder in [model]
    [distill]          # DistillConfig
    [data]             # pyops.data.DataConfig
    [optimizer]        # OptimizerConfig
    [communication]    # CommunicationConfig
    [precision]        # PrecisionConfig
    [zero]             # ZeroConfig
    [recompute]        # RecomputeConfig
    [parallel]         # pyops.config.parallel_config.ParallelConfig
    [elastic]          # ElasticConfig
    [asynchronous]     # AsynchronousConfig
    [healing]          # HealingConfig
    [train]            # TrainConfig
    [observe]          # ObserveConfig
    [task]             # TaskConfig; [vit] is pyops.models.ViTConfig, [bert] pyops.models.BERTConfig

`load_config(path, overrides=["train.num_steps=10"])` reads it. What is wrong is a ConfigError that
names the key, its value and the fix; nothing has been started by then.
"""

from pyops.config.config_error import ConfigError
from pyops.config.distill_config import DistillConfig
from pyops.config.folder_config import AdapterConfig, ModelFolder
from pyops.config.observe_config import ObserveConfig
from pyops.config.parallel_config import ParallelConfig
from pyops.config.reading import config_of, load_config
from pyops.config.run_config import Config
from pyops.config.run_plan import plan_for_run
from pyops.config.task_config import TaskConfig
from pyops.config.training_sections import (
    COMMUNICATING,
    OPTIMIZERS,
    AsynchronousConfig,
    CommunicationConfig,
    HealingConfig,
    OptimizerConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
)
from pyops.elastic.config import ElasticConfig
from pyops.zero import ZeroConfig

__all__ = [
    "COMMUNICATING",
    "OPTIMIZERS",
    "AdapterConfig",
    "AsynchronousConfig",
    "CommunicationConfig",
    "Config",
    "ConfigError",
    "DistillConfig",
    "ElasticConfig",
    "HealingConfig",
    "ModelFolder",
    "ObserveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "TaskConfig",
    "TrainConfig",
    "ZeroConfig",
    "config_of",
    "load_config",
    "plan_for_run",
]
