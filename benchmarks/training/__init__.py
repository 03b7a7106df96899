"""Whole training steps, data, checkpoints, convergence, and kills at random instants."""
