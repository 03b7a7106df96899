"""make_task: the task of a configuration."""

from __future__ import annotations

import torch.distributed as dist

from pyops.config import Config, ConfigError
from pyops.data import load_characters, load_digits, prepare
from pyops.precision import PRECISIONS
from pyops.train.tasks.images_task import ImagesTask
from pyops.train.tasks.passage_tasks import MaskedTask, PassagesTask
from pyops.train.tasks.task import Task
from pyops.train.tasks.text_task import TextTask

__all__ = ["make_task"]

IMAGES = {"digits": load_digits, "characters": load_characters}


def make_task(config: Config, *, group: dist.ProcessGroup | None = None) -> Task:
    """The task of `config.task`. Rank 0 of the group (None: the default one) builds what is cached,
    so all ranks call it.

    Raises:
        ConfigError: For a model that can't be cut into layers, CorpusError for data that is not
            there.
    """
    options, data = config.task, config.data
    if options.kind in IMAGES:
        load, dtype = IMAGES[options.kind], PRECISIONS[config.precision.dtype].dtype
        parts = load(held_out=data.validation_fraction)
        model = getattr(config, options.section)
        return ImagesTask(options.kind, model, parts, count=options.num_copies, dtype=dtype)
    if options.kind == "passages":
        return PassagesTask(
            config.bert, data, each=options.num_passages, count=options.num_copies, group=group
        )
    if options.kind == "masked_text":
        return MaskedTask(
            config.bert, data, count=options.num_copies, seed=config.train.seed, group=group
        )
    if config.model.tied_head:
        raise ConfigError(
            "model.tied_head is true: the head's table would be frozen with the "
            "embedding; set model.tied_head to false"
        )
    length = config.model.sequence_length
    corpus = prepare(data, vocab_size=config.model.vocab_size, sequence_length=length, group=group)
    return TextTask(
        config.model,
        corpus,
        most_held_out=config.train.num_validation_sequences,
        order=config.parallel.cp_order,
    )
