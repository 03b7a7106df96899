"""Tasks: what there is to learn, as samples with numbers, whatever the layout that learns it.

task = make_task(config)                                      of [task], [data], and its model's
                                                              section
inputs, target, named = task.batch(samples, epoch=epoch)      rows of these numbers; PADDING: a row
                                                              that counts nothing
pipeline.step(inputs, target, shape=...,                      with loss=task.loss, reduction="sum"
              scale=1 / (rows * task.terms), **named)
task.loss(output, target)                                     nats, summed: times 1 / (rows * terms)
                                                              it is the mean
task.score(pipeline(inputs, **named), target)                 right ones, or nats

pretraining    characters     masked_text
                   |               |          all but the head's weights: FirstValues
task             digits         passages      text
"""

from pyops.train.tasks.task import Batch, Task
from pyops.train.tasks.task_choice import make_task

__all__ = ["Batch", "Task", "make_task"]
