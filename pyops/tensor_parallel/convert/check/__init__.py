"""A plan tried before a model is changed: outputs and gradients of a cut copy beside those of an
uncut one."""
