"""Layers and losses of a model, each beside its rivals."""
