"""Stages and micro-batches for the layers that are not frozen: the solver, its costs, and short
trials that confirm it."""
