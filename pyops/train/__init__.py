"""The training run: the only room that knows every other.

    config -> ranks -> corpus -> batches -> model
           -> data parallel, or a plan -> optimizer -> checkpoints -> loop

| folder or file | what it does |
|---|---|
| run.py | `train`: a run from its configuration to its outcome |
| loop.py | the steps of a run, with its checkpoints, metrics and display |
| token_training.py | what the two runs over text have in common: a step, its metrics, the end |
| text_training.py | a GPT on text; reads the way the data goes |
| pretrained | a Hugging Face folder, on text or instructions |
| sample_training.py | a task over numbered samples, in a layout that follows what is frozen |
| tasks, initial_weights.py | the tasks; the weights that one starts from |
| lr_range.py | the first steps with a rising learning rate |
| setup | the configuration as objects: layout, model, data parallelism or plan, optimizer, state |
| host | the ranks that torchrun started, the machine's memory, the run's folder |
| report | progress, metrics, log lines, bytes sent, how a run ended |
"""

from pyops.renamed import missing_attribute
from pyops.train.host.ranks import StopRequest
from pyops.train.loop import TrainingLoop
from pyops.train.lr_range import lr_range_test
from pyops.train.report.outcome import Outcome
from pyops.train.run import train
from pyops.train.text_training import TextTraining

__all__ = ["Outcome", "StopRequest", "TextTraining", "TrainingLoop", "lr_range_test", "train"]


def __getattr__(name: str) -> object:
    raise missing_attribute(__name__, name)
