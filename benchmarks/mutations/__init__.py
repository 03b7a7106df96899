"""Damage to checkpoints, Hugging Face folders and configurations, and what is said of it."""
