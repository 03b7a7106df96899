"""Elastic: the training loop's object, what one rank holds and does, and what is saved and
scored."""
