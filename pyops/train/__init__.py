"""The training run: the only room that knows every other.

    config -> ranks -> corpus -> batches -> model -> data parallel -> optimizer -> checkpoints -> loop

Files: `run` (the run itself; reads the way the data goes), `recipe` (data parallel and optimizer, as the configuration says),
`state` (what a checkpoint holds of them), `traffic` (bytes sent), `notes` (what is logged), `ranks`, `folder`.
"""

from pyops.train.lr_range import lr_range_test
from pyops.train.outcome import Outcome
from pyops.train.ranks import StopRequest
from pyops.train.run import Run, train

__all__ = ["Outcome", "Run", "StopRequest", "lr_range_test", "train"]
