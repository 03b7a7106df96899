"""Where a run is: the ranks that torchrun started, the machine's memory, the run's folder."""
