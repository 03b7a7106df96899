"""The rows of a step, and their tokens: which of them a rank has.

| file | what it does |
|---|---|
| batches.py | which rows of the global batch a copy of the model has |
| shared_tokens.py | which tokens of its rows a rank has, where ranks share them out |
| registry.py | attention over ranks in models of transformers |
| attention_calls.py | attention over ranks in the place of torch's functions |
| rows_trial.py | a small copy is tried before a model is changed |
"""
