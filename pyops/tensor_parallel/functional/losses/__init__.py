"""Losses of logits whose vocabulary is cut over ranks.

| file | what it does |
|---|---|
| vocabulary_part.py | a rank's columns of the vocabulary, and statistics of whole rows |
| cross_entropy.py | the loss of logits |
| linear_cross_entropy.py | the loss of a linear layer's logits, which are never whole |
| divergence.py | how far a student's logits are from a teacher's, of a chunk of tokens |
| linear_logits.py | what the logits of a linear layer are computed from, and those of some tokens |
| linear_kl_divergence.py | the same of two linear layers, whose logits are never whole |
| head_gradients.py | the gradients of such a layer, as they add up over chunks |
"""
