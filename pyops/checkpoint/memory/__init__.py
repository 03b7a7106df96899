"""Checkpoints in host memory: a rank's own, and its neighbor's."""
