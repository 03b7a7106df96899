"""Losses of logits whose vocabulary is cut over ranks.

| file | what it does |
|---|---|
| vocabulary_part.py | a rank's columns of the vocabulary, and statistics of whole rows |
| cross_entropy.py | the loss of logits |
| linear_cross_entropy.py | the loss of a linear layer's logits, which are never whole |
"""
