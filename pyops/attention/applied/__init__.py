"""What is done to models that exist already.

| file | what it does |
|---|---|
| longer_positions.py | a longer table of learned positions |
| mask_functions.py | what a mask of transformers says, beside causality: padding, documents |
| transformers_attention.py | apply: a pattern for models of transformers |
"""
