"""Tasks over samples: images, passages, masked text and text."""

from pyops.train.tasks.task import Batch, Task, make_task

__all__ = ["Batch", "Task", "make_task"]
