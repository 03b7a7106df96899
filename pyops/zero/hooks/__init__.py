"""What happens during forward and backward: parameters are gathered, gradients reduce-scattered.

| file | what it does |
|---|---|
| gradients.py | buckets of gradients, reduce-scattered while backward runs |
| reduced.py, shown.py | the value of `.grad` between backward and step, and what a program may do
to it |
| gathering.py | stage 3: when the parameters of a unit are gathered and freed |
| arriving.py | stages 1 and 2: parameters gathered while the next forward computes |
| spread.py | stage 3: an operation on a parameter that is not gathered gets its values, or an error
with the fix |
| kept.py | whether parameters still lie where ZeroOptimizer put them |
"""
