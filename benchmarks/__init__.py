"""Benches: `python -m benchmarks [NAME...]` from the source tree, or `pyops bench`."""
