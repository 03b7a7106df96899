"""Frozen layers and elastic pipelines."""
