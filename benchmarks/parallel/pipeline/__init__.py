"""Pipelines: schedules, partitions, memory."""
