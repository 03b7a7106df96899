"""An existing transformer, its layers replaced in place by tensor-parallel ones.

| file | what it does |
|---|---|
| parallelize.py | parallelize: what users call |
| plans.py, architectures | plans as data; those of the architectures of transformers |
| replacement_plan.py, replace_layers.py | what will be replaced, checked; its replacement |
| module_swap.py, grouped_columns.py | the replacement of one layer; of fused q, k and v matrices |
| head_counts.py, multihead.py | numbers of heads; torch.nn.MultiheadAttention |
| region_hooks.py | hooks at the edges of a replaced region |
| check | a plan tried on a copy before the model is changed |
| whole.py | the state_dict of the model before it was cut |
"""
