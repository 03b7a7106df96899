"""The training run: the only room that knows every other.

    config -> ranks -> corpus -> batches -> model -> data parallel -> optimizer -> checkpoints -> loop

| files | what they do |
|---|---|
| run | the run itself; reads the way the data goes |
| task_run, tasks, first_values | a run over numbered samples: epochs of a task, in a layout that follows what is frozen |
| recipe, strategy | the model, data parallel, the optimizer and where its states lie, as the configuration says |
| pipelined | a model whose layers lie on the ranks of a pipeline |
| state, folder | what a checkpoint holds; the folder of a run, to which one run at a time writes |
| ranks, meeting, membership | the ranks that torchrun started, how they find one another, and a layout for those there are |
| traffic, notes, outcome, heap | bytes sent, what is logged, how a run ended; freed memory given back |
| lr_range | the first steps with a rising learning rate |
"""

from pyops.train.lr_range import lr_range_test
from pyops.train.outcome import Outcome
from pyops.train.ranks import StopRequest
from pyops.train.run import Run, train

__all__ = ["Outcome", "Run", "StopRequest", "lr_range_test", "train"]
