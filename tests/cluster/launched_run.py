"""A rank of a tiny run, whichever launcher started it: `python -m tests.cluster.launched_run CONFIG
[MILLISECONDS [--resume]]`, with so long a pause before each step, whose number rank 0 says."""

from __future__ import annotations

import sys
import time

import torch

from pyops.cli.commands import main
from pyops.train import TextTraining

if __name__ == "__main__":
    torch.set_num_threads(1)
    inner = TextTraining.train_step

    def pausing(self, **given):
        if len(sys.argv) > 2:
            if self.rank == 0:
                print(f"begins step {self.step}", flush=True)
            time.sleep(int(sys.argv[2]) / 1000)
        return inner(self, **given)

    TextTraining.train_step = pausing
    sys.exit(main(["train", sys.argv[1], *sys.argv[3:]]))
