"""All layouts of a model on a cluster, priced; the best of them, and why not the others."""
