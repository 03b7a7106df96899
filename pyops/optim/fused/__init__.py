"""What all optimizers share: torch.optim.Optimizer outside, one kernel launch per param group
inside.

| file | what it does |
|---|---|
| base.py, layerwise.py | the base class; the base of optimizers that use the norm of each layer |
| checks.py, layout.py | what is refused; strides and overlaps of a tensor's memory |
| rows.py, plan.py, launches.py | the rows of one launch; the plan kept between steps; the norm of
all gradients |
| clip.py | unscaling and clipping as one scalar on the device |
| state.py, loading.py, kinds.py | optimizer state: made, saved, loaded, and told apart by optimizer
|
"""
