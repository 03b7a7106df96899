"""Dropout whose masks are the same on every layout of ranks."""
