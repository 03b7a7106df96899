"""The training run: the only room that knows every other.

    config -> ranks -> corpus -> batches -> model -> data parallel -> optimizer -> checkpoints -> loop

| folder or file | what it does |
|---|---|
| text_training.py | the run itself; reads the way the data goes |
| sample_training.py, tasks.py, initial_weights.py | a run over numbered samples, in a layout that follows
what is frozen |
| lr_range.py | the first steps with a rising learning rate |
| folder.py, outcome.py | the folder of a run, to which one run at a time writes; how a run ended |
| setup | the configuration as objects: layout, model, data parallelism, optimizer, state |
| host | the ranks that torchrun started, and the machine's memory |
| report | progress, metrics, log lines, bytes sent |
"""

from pyops.train.host.ranks import StopRequest
from pyops.train.lr_range import lr_range_test
from pyops.train.outcome import Outcome
from pyops.train.text_training import Run, train

__all__ = ["Outcome", "Run", "StopRequest", "lr_range_test", "train"]
