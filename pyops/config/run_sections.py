"""RunSections: the sections of a run's configuration, of which nobody has checked that they go
together."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyops.config.distill_config import DistillConfig
from pyops.config.folder_config import AdapterConfig, ModelFolder
from pyops.config.observe_config import ObserveConfig
from pyops.config.parallel_config import ParallelConfig
from pyops.config.task_config import TaskConfig
from pyops.config.training_sections import (
    AsynchronousConfig,
    CommunicationConfig,
    HealingConfig,
    OptimizerConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
)
from pyops.data import DataConfig
from pyops.elastic.config import ElasticConfig
from pyops.models import BERTConfig, CoAtNetConfig, GPTConfig, ViTConfig
from pyops.zero import ZeroConfig

__all__ = ["RunSections"]


@dataclass(frozen=True)
class RunSections:
    """The sections of a run; see `Config`."""

    name: str = "run"
    model: GPTConfig = field(default_factory=GPTConfig)
    model_folder: ModelFolder = field(default_factory=ModelFolder, metadata={"toml": False})
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    healing: HealingConfig = field(default_factory=HealingConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    vit: ViTConfig = field(default_factory=ViTConfig)
    coatnet: CoAtNetConfig = field(default_factory=CoAtNetConfig)
    bert: BERTConfig = field(default_factory=BERTConfig)
