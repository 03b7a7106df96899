"""An existing transformer, its layers replaced in place by tensor-parallel ones.

| file | what it does |
|---|---|
| parallelize.py | parallelize: what users call |
| plans.py, architectures | plans as data; those of the architectures of transformers |
| blueprint.py, perform.py | what will be replaced, decided and checked; the replacement |
| swap.py, packed.py | the replacement of one layer; of fused query, key and value matrices |
| heads.py, multihead.py, edges.py | numbers of heads; torch.nn.MultiheadAttention; hooks at the
edges of a replaced region | | check | a plan tried on a copy before the model is changed |
| whole.py | the state_dict of the model before it was cut |
"""
