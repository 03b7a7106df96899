"""Collectives, codecs and training over a slow link."""
