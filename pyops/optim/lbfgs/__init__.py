"""L-BFGS on flat vectors, with a strong Wolfe line search.

| file | what it does |
|---|---|
| lbfgs.py | the optimizer |
| history.py | steps and differences of gradients, their inner products, the direction |
| line_search.py | which step lengths are tried: pure arithmetic |
"""

from pyops.optim.lbfgs.lbfgs import LBFGS

__all__ = ["LBFGS"]
